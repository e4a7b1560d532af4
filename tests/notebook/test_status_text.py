"""The status of a cluster as text and as HTML."""

from __future__ import annotations

from types import SimpleNamespace

from msgspec.structs import replace

from nbelastic.notebook.status_text import StatusView
from nbelastic.protocol.status import CopiesStatus, Status, WorkerCopies, WorkerStatus


def worker(rank, copies=None):
    return WorkerStatus(f"host/{rank}#1", "host", rank, rank, rank, 1, "running", 9, 0, "", copies=copies)


def status(*workers, copies=None):
    return Status("s", "running", "", 1, 2, 1, None, (), workers, "job-1", "", 1241, time=1000.0, copies=copies)


SHARDED = status(
    worker(0, WorkerCopies(600_000_000, ("host/1#1",), ("host/1#1",))),
    worker(1, WorkerCopies(600_000_000, (), ("host/0#1",))),
    worker(2, WorkerCopies(600_000_000, (), (), shared=True)),
    worker(3),
    copies=CopiesStatus(1240, 999.2, 0.4, 1_200_000_000, 2),
)


def test_the_copies_of_a_sharded_model_are_one_line_and_a_column():
    """The newest whole commit and its age, all memory, the time to copy, and where each worker's copy is."""
    lines = repr(StatusView(SHARDED)).splitlines()
    assert lines[2] == "whole commit 1240, 0.8 s old · copies 1.2 GB (2 workers) · copied in 0.4 s"
    copies = [line.split("  ")[-1].strip() for line in lines[-4:]]
    assert copies == ["600 MB, copy on host/1", "600 MB", "600 MB, shared on host", "0"]
    html = StatusView(SHARDED)._repr_html_()
    assert ">600 MB, copy on host/1</td>" in html
    assert "<div>whole commit 1240, 0.8 s old" in html


def test_other_jobs_show_nothing_about_copies():
    """Neither a line nor a column."""
    assert "cop" not in repr(StatusView(status(worker(0))))


def test_a_program_with_a_step_of_its_own_has_commits():
    """The line of the job and the column of the workers name what they count."""
    lines = repr(StatusView(replace(status(worker(0)), report={"step": 1200.0}))).splitlines()
    assert lines[1] == "job-1 running · commit 1241 · step 1200"
    assert "commit" in lines[-2]
    assert "step" not in lines[-2]


def test_a_whole_number_has_all_its_digits():
    """A count that the program reports is not rounded, as the progress line of a terminal does not round it either."""
    report = {"step": 123456.0, "loss": 0.123456, "huge": 1e20, "text": "<1>"}
    lines = repr(StatusView(replace(status(worker(0)), report=report))).splitlines()
    assert lines[1].endswith(" · step 123456 · loss 0.1235 · huge 1e+20 · text <1>")


def test_before_the_first_whole_commit_the_line_says_so():
    """After a loss the memory is not known until the new world has copies."""
    first = replace(SHARDED, copies=CopiesStatus(None, 0.0, 0.0, 2_500_000, 1))
    assert "\nno whole commit yet · copies 2.5 MB (1 worker)\n" in repr(StatusView(first))
    forming = replace(SHARDED, copies=CopiesStatus(8, 940.0, 1.25, 0, 0))
    assert "\nwhole commit 8, 60 s old · copied in 1.2 s\n" in repr(StatusView(forming))


def test_a_failed_job_has_its_reason():
    """That of the newest failure, and not of a job that succeeded after it."""
    texts = ("rank 0 raised KeyError: 'x'", "rank 1 raised ValueError: <3>")
    events = [SimpleNamespace(kind="job-failed", text=f"job-1 failed: {text}") for text in texts]
    cluster = SimpleNamespace(events=events, status=lambda: replace(status(), outcome="failed"))
    assert texts[1] in repr(StatusView.of(cluster)).splitlines()
    assert "ValueError: &lt;3&gt;</div>" in StatusView.of(cluster)._repr_html_()
    cluster.status = lambda: replace(status(), outcome="succeeded")
    assert "ValueError" not in repr(StatusView.of(cluster))
