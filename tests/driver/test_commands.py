"""`nbelastic` in a terminal: what it prints, refuses and orders, on clusters whose drivers run in threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from nbelastic.cli.follow import Output
from nbelastic.cli.main import main
from nbelastic.driver.results import Outcome
from nbelastic.protocol import messages
from tests.core.story import wid
from tests.driver.raw_client import blob, end_job, in_driver
from tests.support.waiting import until


@pytest.fixture
def said(capsys):
    """Run a command; what it has printed, its errors, and its exit code."""

    def run(line: str) -> tuple[str, str, int]:
        capsys.readouterr()
        code = main(line.split())
        return *capsys.readouterr(), code

    return run


def prints(cluster, job, rank: int, text: str) -> None:
    """As if a worker had."""
    w = wid(f"a/{rank}#1")

    def hear(driver):
        driver._components.received_messages.is_known = lambda _: True
        end = driver.runs[job.name]._received_to.get((w, "out"), 0) + len(text)
        driver._on_message(f"worker/{w}", messages.WorkerOutput(w, "out", text, end, job.name, rank))

    in_driver(cluster, hear)
    until(lambda: text.strip().rpartition("\n")[2] in job.logs())


def test_without_a_cluster_each_command_says_so(said, clusters_folder):
    assert said("list") == ("No cluster is running.\n", "", 0)
    for line in ("status", "logs", "logs -f", "stop", "attach", "scale --min 1"):
        assert said(line) == ("", "nbelastic: you have no cluster on this machine.\n", 1)
    out, error, code = said("add train gpu1")
    assert (out, code) == ("", 1)
    assert "there is no cluster 'train' here" in error


@pytest.mark.parametrize("line", ["add train", "status a b", "nonsense", "logs --rank x"])
def test_what_is_no_command_is_refused_with_the_usage(line, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert "usage: nbelastic" in capsys.readouterr().err


def test_a_cluster_that_is_alone_needs_no_name(start_hostless, said):
    """Kept or not; where there are several, they are named."""
    cluster = start_hostless()
    assert "waiting" in said("status")[0]
    assert json.loads(said("status quiet --json")[0])["name"] == "quiet"
    assert "nbelastic attach quiet" in said("list")[0]
    start_hostless("other")
    assert said("status") == ("", "nbelastic: say which cluster: other, quiet.\n", 1)
    assert said("status other")[2] == 0
    assert cluster.status().phase == "waiting", "a look does not end it"


def test_orders_are_those_of_a_notebook(start_hostless, said):
    """Who has given one is told to all, as soon as several are connected."""
    cluster = start_hostless()
    cluster.scale(2, 9)
    assert said("scale --max 4") == ("quiet: 2–4 workers from now on.\n", "", 0)
    until(lambda: (cluster.status().min, cluster.status().max) == (2, 4))
    until(lambda: any("min 2, max 9 by you" in event.text for event in cluster.events))
    text = next(event.text for event in cluster.events if "max 4" in event.text)
    assert text.startswith("min 2, max 4 by nbelastic scale (")
    assert said("remove quiet nowhere") == ("", "nbelastic: there is no host 'nowhere'; the hosts are none.\n", 1)
    assert said("scale") == ("", "nbelastic: give --min N, --max N or both.\n", 1)


def test_a_stop_is_over_when_the_cluster_is(start_hostless, said):
    cluster = start_hostless(keep=True)
    cluster.run(os.getpid)
    assert said("stop --job") == ("quiet: job-1 is being stopped.\n", "", 0)
    assert cluster.job.wait(10).status == "stopped"
    assert said("stop --job") == ("quiet: no job is running.\n", "", 0)
    assert said("stop quiet") == ("quiet: stopped.\n", "", 0)
    assert not cluster._link.run_folder.path.exists()
    assert cluster.status().reason.startswith("stopped: stopped by nbelastic stop (")


def test_logs_are_in_the_order_in_which_they_came(start_hostless, said):
    """Of all ranks or of one, the last lines of them."""
    cluster = start_hostless()
    assert said("logs") == ("", "nbelastic: no job has run yet on 'quiet'.\n", 1)
    job = cluster.run(os.getpid)
    for rank, text in ((1, "one\n"), (0, "two\n"), (1, "six\n"), (0, "bar")):
        prints(cluster, job, rank, text)
    assert said("logs")[0] == "rank 1 | one\nrank 0 | two\nrank 1 | six\nrank 0 | bar\n"
    assert said("logs --rank 1")[0] == "rank 1 | one\nrank 1 | six\n"
    assert said("logs --tail 1")[0] == "rank 1 | six\nrank 0 | bar\n", "a line that has no end yet comes last"


def test_who_follows_sees_each_line_once_until_the_job_ends(start_hostless, capsys):
    cluster = start_hostless()
    following = threading.Thread(target=main, args=(["logs", "-f", "--tail", "1"],))
    following.start()
    job = cluster.run(os.getpid)  # it waits for one
    for text in ("one\n", "two\n", "six\n"):
        prints(cluster, job, 0, text)
    lines = []
    until(lambda: lines.append(capsys.readouterr().out) or "six" in "".join(lines))
    prints(cluster, job, 0, "end")
    end_job(cluster, job, Outcome(value=blob(None)))
    following.join(10)
    out, error = capsys.readouterr()
    assert error == "job-1 succeeded\n"
    lines = "".join([*lines, out]).splitlines()
    assert lines[-2:] == ["rank 0 | six", "rank 0 | end"]
    assert len(lines) == len(set(lines))


def test_who_is_attached_sees_events_and_output_until_the_cluster_stops(start_hostless, capsys):
    """Of one job after the other."""
    cluster = start_hostless()
    following = threading.Thread(target=main, args=(["attach"],))
    following.start()
    seen = []
    for text in ("one\n", "two\n"):
        job = cluster.run(os.getpid)
        prints(cluster, job, 0, text)
        end_job(cluster, job, Outcome(value=blob(None)))
        job.wait(10)
        until(lambda: seen.append(capsys.readouterr().out) or f"rank 0 | {text}" in "".join(seen))
    cluster.scale(2, 3)
    cluster.stop()
    following.join(10)
    out = "".join([*seen, capsys.readouterr().out])
    assert "min 2, max 3 by you" in out
    assert out.count("job-1 was submitted") == out.count("job-2 was submitted") == 1
    assert out.splitlines()[-1].startswith("finished: stopped: stopped by hand (process ")


def test_an_interrupt_ends_the_command_alone(start_hostless, monkeypatch, capsys):
    cluster = start_hostless()

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("nbelastic.cli.follow._wait", interrupt)
    assert main(["attach"]) == 130
    assert cluster.status().phase == "waiting"


def test_words_of_others_do_not_steer_the_terminal(start_hostless, said):
    """What a program prints, or a host says, may be coloured, and no more."""
    cluster = start_hostless()
    job = cluster.run(os.getpid)
    prints(cluster, job, 0, "\x1b]0;title\x07\x1b[31mred\x1b[0m \x1b]52;c;QQ==\x1b\\and\x9b blue\n")
    assert said("logs")[0] == "rank 0 | \x1b[31mred\x1b[0m and blue\n"


def test_a_line_that_comes_after_the_first_look_is_shown(start_hostless, capsys):
    """A follower has looked before anything was printed; later it says how many lines it has missed."""
    cluster = start_hostless()
    output, job = Output(), cluster.run(os.getpid)
    output.show(job)
    prints(cluster, job, 0, "first\n")
    output.show(job)
    prints(cluster, job, 0, "".join(f"{i}\n" for i in range(1500)) + "end\n")
    output.show(job)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["rank 0 | first", "… 501 lines are only in the log files …", "rank 0 | 501"]
    assert lines[-1] == "rank 0 | end"


@pytest.mark.parametrize("seconds", ["-3", "nan", "inf"])
def test_a_stop_takes_no_nonsense(start_hostless, said, seconds):
    """And stops nothing then."""
    cluster = start_hostless()
    out, error, code = said(f"stop --timeout {seconds}")
    assert (out, code) == ("", 1)
    assert "a number of seconds, at least 0" in error
    assert cluster.status().phase == "waiting"


def test_each_host_is_told_of(start_hostless, said):
    """One that is refused does not keep the others from being added."""
    cluster = start_hostless()
    out, error, code = said("add quiet a:x 127.0.0.9:1")
    assert (out, code) == ("quiet: 127.0.0.9:1 is being added.\n", 1)
    assert "number of slots" in error
    until(lambda: [host.name for host in cluster.hosts] == ["127.0.0.9"])
    cluster.remove_host("127.0.0.9", now=True)


def test_follow_says_why_a_job_has_failed(start_hostless, said):
    """With the traceback, and by its exit code."""
    cluster = start_hostless()
    job = cluster.run(os.getpid)
    end_job(cluster, job, Outcome(error="ValueError: no data", traceback="Traceback: no data"))
    out, error, code = said("logs -f")
    assert (out, code) == ("", 1)
    assert error == "nbelastic: job-1 failed: it failed\n\nTraceback: no data\n"


@pytest.mark.parametrize("name", ["-x", "../x", "~nobody-at-all/x", "\udcff", "a b"])
def test_names_that_cannot_be_are_refused_in_one_line(clusters_folder, capsys, name):
    assert main(["status", "--", name]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def run_alone(*words: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nbelastic", *words]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60, **options)


def test_an_output_that_cannot_be_written_to(clusters_folder):
    """Closed, full or without the characters: one line at most, no traceback."""
    closed = run_alone("list", preexec_fn=lambda: os.close(1))
    assert (closed.returncode, closed.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        done = run_alone("list", stdout=full)
    assert (done.returncode, done.stderr) == (1, "nbelastic: [Errno 28] No space left on device\n")
    ascii_only = run_alone("--help", stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert ascii_only.returncode == 0
