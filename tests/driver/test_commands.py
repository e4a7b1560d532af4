"""The command `nbelastic` in a terminal: what it prints, refuses and requests. The clusters' drivers run in threads."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from datetime import datetime

import pytest

import nbelastic as nbe
from nbelastic.cli.follow import Output
from nbelastic.cli.main import main
from nbelastic.client.doctor import Finding
from nbelastic.driver.results import Outcome
from nbelastic.protocol import messages
from nbelastic.system.terminal_text import as_displayed
from tests.core.story import wid
from tests.driver.raw_client import blob, end_job, in_driver
from tests.support.processes import run_folder
from tests.support.waiting import until


@pytest.fixture
def run_command(capsys):
    """Run a command; return what it printed, its errors, and its exit code."""

    def run(line: str) -> tuple[str, str, int]:
        capsys.readouterr()
        code = main(line.split())
        return *capsys.readouterr(), code

    return run


def print_as_worker(cluster, job, rank: int, text: str) -> None:
    """Print this text as a worker of the job does."""
    w = wid(f"a/{rank}#1")

    def receive(driver):
        driver._components.received_messages.is_known = lambda _: True
        end = driver.runs[job.name]._received_to.get((w, "out"), 0) + len(text)
        driver._on_message(f"worker/{w}", messages.WorkerOutput(w, "out", text, end, job.name, rank))

    in_driver(cluster, receive)
    until(lambda: as_displayed(text.strip().rpartition("\n")[2]) in job.logs())


def test_without_a_cluster_each_command_says_so(run_command, clusters_folder):
    """Each command without a cluster ends with one line that says so."""
    assert run_command("list") == ("No cluster is running.\n", "", 0)
    for line in ("status", "logs", "logs -f", "stop", "attach", "scale --min 1"):
        why = "a cluster ends with its kernel, unless %elastic_start has --keep"
        assert run_command(line) == ("", f"nbelastic: you have no cluster on this machine: {why}.\n", 1)
    out, error, code = run_command("add train gpu1")
    assert (out, code) == ("", 1)
    assert "there is no cluster 'train' here" in error


@pytest.mark.parametrize("line", ["add train", "status a b", "nonsense", "logs --rank x"])
def test_invalid_arguments_are_refused_with_the_usage(line, capsys):
    """Invalid arguments end the command with the usage and exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert "usage: nbelastic" in capsys.readouterr().err


def test_the_only_cluster_needs_no_name(start_hostless, run_command):
    """A command finds the only cluster without its name, and lists the names if there are several."""
    cluster = start_hostless()
    assert "waiting" in run_command("status")[0]
    assert json.loads(run_command("status quiet --json")[0])["name"] == "quiet"
    assert "nbelastic attach quiet" in run_command("list")[0]
    start_hostless("other")
    assert run_command("status") == ("", "nbelastic: say which cluster: other, quiet.\n", 1)
    assert run_command("status other")[2] == 0
    assert cluster.status().phase == "waiting", "a command does not end it"


def test_commands_have_the_effect_of_a_notebook_s_calls(start_hostless, run_command):
    """Commands act like a notebook's calls; once several clients are connected, events name the one that asked."""
    cluster = start_hostless()
    cluster.scale(2, 9)
    assert run_command("scale --max 4") == ("quiet: 2–4 workers from now on.\n", "", 0)
    until(lambda: (cluster.status().min, cluster.status().max) == (2, 4))
    until(lambda: any("min 2, max 9 by you" in event.text for event in cluster.events))
    text = next(event.text for event in cluster.events if "max 4" in event.text)
    assert text.startswith("min 2, max 4 by nbelastic scale (")
    assert run_command("remove quiet nowhere") == (
        "",
        "nbelastic: there is no host 'nowhere'; the hosts are none.\n",
        1,
    )
    assert run_command("scale") == ("", "nbelastic: give --min N, --max N or both.\n", 1)


def test_stop_returns_when_the_cluster_has_ended(start_hostless, run_command):
    """`stop` returns when the cluster has ended, and `stop --job` at once."""
    cluster = start_hostless(keep=True)
    cluster.run(os.getpid)
    refused = "nbelastic: --timeout is for the stop of the cluster: leave out it or --job.\n"
    assert run_command("stop --job --timeout 5") == ("", refused, 1)
    assert run_command("stop --job") == ("quiet: job-1 is being stopped.\n", "", 0)
    assert cluster.job.wait(10).status == "stopped"
    assert run_command("stop --job") == ("quiet: no job is running.\n", "", 0)
    assert run_command("stop quiet") == ("quiet: stopped.\n", "", 0)
    assert not run_folder(cluster).exists()
    assert cluster.status().reason.startswith("stopped: stopped by nbelastic stop (")


def test_logs_are_in_order_of_arrival(start_hostless, run_command):
    """`logs` prints lines in order of arrival, of all ranks or of one, with `--tail` only the last ones."""
    cluster = start_hostless()
    assert run_command("logs") == ("", "nbelastic: no job has run yet on 'quiet'.\n", 1)
    job = cluster.run(os.getpid)
    for rank, text in ((1, "one\n"), (0, "two\n"), (1, "six\n"), (0, "bar")):
        print_as_worker(cluster, job, rank, text)
    assert run_command("logs")[0] == "rank 1 | one\nrank 0 | two\nrank 1 | six\nrank 0 | bar\n"
    assert run_command("logs --rank 1")[0] == "rank 1 | one\nrank 1 | six\n"
    assert run_command("logs --tail 1")[0] == "rank 1 | six\nrank 0 | bar\n", "an unfinished line comes last"
    assert (run_command("logs --tail 0")[0], job.logs(tail=0)) == ("rank 0 | bar\n", "")
    assert run_command("logs --tail -1")[1] == "nbelastic: tail=-1: give the number of newest lines to show.\n"
    with pytest.raises(nbe.UsageError, match="tail=-1"):
        job.logs(tail=-1)
    with pytest.raises(nbe.UsageError, match="no worker 'b/7#1', and none of that name has printed"):
        job.logs(worker="b/7#1")
    with pytest.raises(nbe.UsageError, match=r"give logs\(\) a rank or a worker"):
        job.logs(rank=0, worker="b/7#1")


def test_logs_begin_with_times_if_asked(start_hostless, run_command):
    """With `--timestamps` each line begins with its time in UTC, as `docker logs` and `kubectl logs` print it."""
    cluster = start_hostless()
    job = cluster.run(os.getpid)
    for text in ("one\n", "bar"):
        print_as_worker(cluster, job, 0, text)
    lines = run_command("logs --timestamps")[0].splitlines()
    assert [line.partition("Z ")[2] for line in lines] == ["rank 0 | one", "rank 0 | bar"]
    received = [line.time for _, line in (*job.lines_since(0), *job.unfinished_lines())]
    times = [datetime.fromisoformat(line.split()[0]).timestamp() for line in lines]
    assert times == pytest.approx(received, rel=0, abs=0.001)
    assert run_command("logs -t")[0].splitlines() == lines


def test_follow_prints_each_line_once_until_the_job_ends(start_hostless, capsys):
    """`logs -f` prints each line once, and ends with the job."""
    cluster = start_hostless()
    following = threading.Thread(target=main, args=(["logs", "-f", "--tail", "1"],))
    following.start()
    job = cluster.run(os.getpid)  # the command waits for a job
    for text in ("one\n", "two\n", "six\n"):
        print_as_worker(cluster, job, 0, text)
    lines = []
    until(lambda: lines.append(capsys.readouterr().out) or "six" in "".join(lines))
    print_as_worker(cluster, job, 0, "end")
    end_job(cluster, job, Outcome(value=blob(None)))
    following.join(10)
    out, error = capsys.readouterr()
    assert error == "job-1 succeeded\n"
    lines = "".join([*lines, out]).splitlines()
    assert lines[-2:] == ["rank 0 | six", "rank 0 | end"]
    assert len(lines) == len(set(lines))


def test_attach_prints_events_and_output_until_the_cluster_stops(start_hostless, capsys):
    """`attach` prints the events and output of each job, and ends with the cluster."""
    cluster = start_hostless()
    following = threading.Thread(target=main, args=(["attach"],))
    following.start()
    seen = []
    for text in ("one\n", "two\n"):
        job = cluster.run(os.getpid)
        print_as_worker(cluster, job, 0, text)
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


def test_an_interrupt_ends_only_the_command(start_hostless, monkeypatch, capsys):
    """Ctrl-C ends the command with exit code 130; the cluster continues."""
    cluster = start_hostless()

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("nbelastic.cli.follow._wait", interrupt)
    assert main(["attach"]) == 130
    assert cluster.status().phase == "waiting"


def test_control_sequences_in_output_are_removed(start_hostless, run_command):
    """Colours in a program's output are kept, and other control sequences are removed."""
    cluster = start_hostless()
    job = cluster.run(os.getpid)
    print_as_worker(cluster, job, 0, "\x1b]0;title\x07\x1b[31mred\x1b[0m \x1b]52;c;QQ==\x1b\\and\x9b blue\n")
    assert run_command("logs")[0] == "rank 0 | \x1b[31mred\x1b[0m and blue\n"


def test_a_follower_prints_new_lines_and_how_many_it_missed(start_hostless, capsys):
    """A follower prints lines that follow its first poll, and the number of lines that it missed."""
    cluster = start_hostless()
    output, job = Output(), cluster.run(os.getpid)
    output.show(job)
    print_as_worker(cluster, job, 0, "first\n")
    output.show(job)
    print_as_worker(cluster, job, 0, "".join(f"{i}\n" for i in range(10_500)) + "end\n")
    output.show(job)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["rank 0 | first", "… 501 lines are only in the log files …", "rank 0 | 501"]
    assert lines[-1] == "rank 0 | end"


def test_a_rank_without_lines_is_named(start_hostless, run_command):
    """A rank that has printed nothing, or that the job does not have, is one line on stderr; a negative one is refused."""
    cluster = start_hostless()
    print_as_worker(cluster, cluster.run(os.getpid), 0, "first\n")
    assert run_command("logs --rank 0") == ("rank 0 | first\n", "", 0)
    assert run_command("logs --rank 9") == ("", "rank 9 of job-1 has printed nothing\n", 0)
    assert run_command("logs --rank -1") == ("", "nbelastic: rank=-1: ranks begin at 0.\n", 1)
    assert run_command("logs --rank 0 --tail 0") == ("", "", 0), "it has printed, although no line is shown"


@pytest.mark.parametrize("seconds", ["-3", "nan", "inf"])
def test_an_invalid_timeout_of_a_stop_is_refused(start_hostless, run_command, seconds):
    """An invalid number of seconds is refused, and stops nothing."""
    cluster = start_hostless()
    out, error, code = run_command(f"stop --timeout {seconds}")
    assert (out, code) == ("", 1)
    assert "a number of seconds, at least 0" in error
    assert cluster.status().phase == "waiting"


def test_each_host_is_reported(start_hostless, run_command):
    """A refused host is reported, and does not keep the others from being added."""
    cluster = start_hostless()
    out, error, code = run_command("add quiet a:x 127.0.0.9:1")
    assert (out, code) == ("quiet: 127.0.0.9:1 is being added.\n", 1)
    assert "number of slots" in error
    until(lambda: [host.name for host in cluster.hosts] == ["127.0.0.9"])
    cluster.remove_host("127.0.0.9", now=True)


def test_follow_says_why_a_job_has_failed(start_hostless, run_command):
    """`logs -f` of a failed job prints the traceback, and has exit code 1."""
    cluster = start_hostless()
    job = cluster.run(os.getpid)
    end_job(cluster, job, Outcome(error="ValueError: no data", traceback="Traceback: no data"))
    out, error, code = run_command("logs -f")
    assert (out, code) == ("", 1)
    assert error == "nbelastic: job-1 failed: it failed\n\nTraceback: no data\n"


@pytest.mark.parametrize("name", ["-x", "../x", "~nobody-at-all/x", "\udcff", "a b"])
def test_invalid_names_are_refused_in_one_line(clusters_folder, capsys, name):
    """An invalid name is refused with one line."""
    assert main(["status", "--", name]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def run_alone(*words: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nbelastic", *words]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60, **options)


def test_an_output_that_cannot_be_written_to(clusters_folder):
    """An output that is closed, full or lacks the characters causes at most one line and no traceback."""
    closed = run_alone("list", preexec_fn=lambda: os.close(1))
    assert (closed.returncode, closed.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        done = run_alone("list", stdout=full)
    assert (done.returncode, done.stderr) == (1, "nbelastic: [Errno 28] No space left on device\n")
    ascii_only = run_alone("--help", stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert ascii_only.returncode == 0


def test_an_error_of_the_system_without_an_output(clusters_folder, monkeypatch, capsys):
    """If the standard output is closed, an error of the system is one line on stderr, too."""

    def fail() -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(nbe.Cluster, "all", fail)
    monkeypatch.setattr("sys.stdout", None)
    assert main(["list"]) == 1
    assert capsys.readouterr().err == f"nbelastic: [Errno {errno.EROFS}] Read-only file system\n"


@pytest.fixture
def unwell(monkeypatch):
    """The doctor prints a table, and then its command fails."""
    monkeypatch.setattr("nbelastic.cli.main.examine", lambda *_: [Finding("gpu1", "wrong", "it has no ssh.")])


def test_an_error_follows_the_output_in_one_file(unwell, monkeypatch, tmp_path):
    """`nbelastic doctor gpu1 > log 2>&1`: the line that speaks of the lines before it is the last one."""
    log = tmp_path / "log"
    with log.open("a") as output, log.open("a", buffering=1) as errors:
        monkeypatch.setattr("sys.stdout", output)
        monkeypatch.setattr("sys.stderr", errors)
        assert main(["doctor", "gpu1"]) == 1
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["host", "gpu1", "nbelastic:"]


def test_a_command_that_fails_may_lose_its_reader(unwell, monkeypatch, capsys):
    """`nbelastic doctor gpu1 | grep -q wrong`: the exit code is that of the error, and nothing is left to be written."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        assert main(["doctor", "gpu1"]) == 1
        output.flush()  # as Python does at its end
    assert capsys.readouterr().err.startswith("nbelastic: not all is well")
