"""The output of jobs: log files, `job.logs()` and progress bars. No test ends a worker."""

from __future__ import annotations

import os

import pytest

import nbelastic as nbe
from tests.support.waiting import until


def print_in_many_ways():
    import subprocess
    import sys

    print(f"out of {os.getpid()}")
    print("err of", os.getpid(), file=sys.stderr)
    sys.stdout.write("no newline")
    print("\nstrange \udcff text")
    os.write(1, b"straight to the descriptor\n")
    subprocess.run(["echo", "from a child"], check=True)


def test_each_worker_has_its_log_files(cluster):
    """Each worker has two files per job, for stdout and stderr, also of child processes; the next job changes neither."""
    job = cluster.run(print_in_many_ways)
    job.result(timeout=20)
    folder = cluster.log_dir / job.name
    for w in cluster.workers:
        stem = w.id.replace("/", "-").replace("#", "-")
        out = (folder / f"{stem}.out").read_text()
        assert f"out of {w.pid}\n" in out
        assert "no newline\nstrange ? text\n" in out
        assert "straight to the descriptor\n" in out
        assert "from a child\n" in out
        assert "err of" not in out
        assert (folder / f"{stem}.err").read_text() == f"err of {w.pid}\n"
        assert (folder / f"{stem}.out").stat().st_mode & 0o777 == 0o600
    before = {file: file.read_bytes() for file in folder.iterdir()}
    cluster.run(print, "next").result(timeout=20)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_jobs_in_quick_succession_keep_their_output_apart(cluster):
    """All output of a job arrives in the logs of that job, even if the next job begins at once."""
    jobs = []
    for number in range(20):
        jobs.append(cluster.run(print, f"job {number}"))
        jobs[-1].result(timeout=20)
    until(lambda: all(len(job.logs().splitlines()) >= 3 for job in jobs))
    for number, job in enumerate(jobs):
        assert [line.partition(" | ")[2] for line in job.logs().splitlines()] == [f"job {number}"] * 3


def test_logs_of_a_job(cluster):
    """`job.logs()` returns the output of all workers, of one rank or of one worker."""

    def program():
        @nbe.elastic
        def loop(_):
            for number in range(5):
                print(f"rank {nbe.rank()} line {number}")

        loop(nbe.ObjectState())

    job = cluster.run(program)
    job.result(timeout=20)
    until(lambda: len(job.logs().splitlines()) == 15)
    assert job.logs(rank=1, tail=2) == "rank 1 line 3\nrank 1 line 4"
    w = cluster.workers[2]
    assert len(job.logs(worker=w.id).splitlines()) == 5
    assert f"{w.id} | rank " in job.logs()
    with pytest.raises(nbe.UsageError, match="no rank 7"):
        job.logs(rank=7)


BARS = """\
import os, pathlib, sys, time
from tqdm import tqdm
from tqdm.auto import tqdm as auto
for step, (name, bar) in enumerate((("plain", tqdm), ("auto", auto))):
    with bar(total=4, desc=name) as shown:
        shown.update(2)
        shown.refresh()
        while not pathlib.Path({file!r} + str(step)).exists():
            time.sleep(0.01)
        shown.update(2)
print("the last", "words", end="")
"""


def test_progress_bars_are_shown(cluster, tmp_path):
    """A progress bar is shown while it runs, and is one line in the end. The last output needs no newline."""
    file = tmp_path / "go on "
    job = cluster.run_cell(BARS.format(file=str(file)))
    for step, name in enumerate(("plain", "auto")):
        until(lambda name=name: all(f"{name}:  50%" in job.logs(worker=w.id) for w in cluster.workers))
        file.with_name(f"go on {step}").touch()
    job.result(timeout=20)
    for ending in ("auto: 100%", "the last words"):  # stderr and stdout arrive one after the other
        until(lambda ending=ending: all(ending in job.logs(worker=w.id) for w in cluster.workers))
    for worker in cluster.workers:
        lines = job.logs(worker=worker.id).split("\n")
        assert [line.partition("|")[0] for line in lines] == ["plain: 100%", "auto: 100%", "the last words"]
        assert not any("\r" in line or "\x1b" in line for line in lines)


def test_a_lot_of_output(cluster):
    """Megabytes of output delay no worker; the log files have all of it."""

    def program():
        for number in range(30_000):
            print(f"{number:099d}")

    job = cluster.run(program)
    job.result(timeout=30)
    for file in (cluster.log_dir / job.name).glob("*.out"):
        assert file.stat().st_size == 3_000_000
