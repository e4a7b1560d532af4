"""Waiting for a job: what a terminal shows meanwhile, and how the wait ends."""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import termios
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ipykernel.iostream import OutStream
from msgspec.structs import replace

from nbelastic.client import progress
from nbelastic.client.job import Job
from nbelastic.client.progress import INTERVAL, ProgressLine, describe_progress, fit, terminal
from nbelastic.client.waiting import wait_for_result
from nbelastic.driver.job_run import JobRun
from nbelastic.errors import JobError, JobStoppedError, WaitTimeoutError
from nbelastic.protocol.status import Status, WorkerStatus
from nbelastic.system import pickling

WAITING = Status(
    name="mine",
    phase="waiting",
    reason="1 of min 2 workers ready; waiting for gpu2",
    generation=1,
    world_size=0,
    min=2,
    max=8,
    hosts=(),
    workers=(),
    job="job-1",
    outcome="",
)
RUNNING = replace(
    WAITING,
    phase="running",
    reason="",
    world_size=4,
    step=1203,
    total=3000,
    steps_per_second=55.14,
    report={"loss": 0.2321},
)


class Terminal(io.StringIO):
    """A terminal; `lines` lists what it showed, update by update."""

    def isatty(self):
        return True

    @property
    def lines(self):
        return [text.removesuffix("\x1b[K") for text in self.getvalue().split("\r")[1:]]


class LostTerminal(Terminal):
    """A terminal whose window was closed."""

    def write(self, text):
        raise OSError("Input/output error")


class FakeDriver:
    """A driver whose cluster goes through `story`, one status per query; `end` ends the job with the last one."""

    def __init__(self, story, end):
        self._story, self._end, self.forked = list(story), end, False

    @property
    def status(self):
        if len(self._story) > 1:
            return self._story.pop(0)
        end, self._end = self._end, lambda: None
        end()
        return self._story[0]


@pytest.fixture
def stderr(monkeypatch):
    """A function that sets the standard error, because pytest puts its own into `sys` when a test begins."""
    return lambda stream: monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))


@pytest.fixture
def screen(stderr, monkeypatch):
    """Make the standard error a terminal of 100 columns."""
    stream = Terminal()
    stderr(stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return stream


def packed(*values):
    """Values as workers return them."""
    return [b"".join(pickling.pack(value)) for value in values]


def job_of(*story, end=lambda run: run.future.set_result(packed(7))):
    run = JobRun("job-1", None)
    driver = FakeDriver(story or [RUNNING], lambda: end(run))
    return Job(lambda: driver, run)


# ---- the line ----


def test_a_job_that_trains_says_how_far_it_is():
    """The line of a running job has its workers, steps, speed, remaining time and loss."""
    assert describe_progress(RUNNING) == (
        "job-1 running · 4 / 2–8 workers · step 1,203 of 3,000 · 55.1 steps/s · 0:33 left · loss 0.232"
    )


def test_a_program_with_a_step_of_its_own_has_commits():
    """Lightning reports its own step, and commits more often: the count of commits has its name."""
    text = describe_progress(replace(RUNNING, step=1240, report={"loss": 0.2321, "step": 1200.0}))
    assert "commit 1,240 of 3,000 · 55.1 commits/s" in text
    assert text.endswith("loss 0.232 · step 1,200")


def test_restarts_are_counted():
    """The line has the restarts of all workers, if there are any."""
    workers = tuple(WorkerStatus(f"a/{i}#2", "a", i, i, i, 100 + i, "running", 0, i, "", "") for i in range(3))
    assert "4 / 2–8 workers · 3 restarts · step 1,203" in describe_progress(replace(RUNNING, workers=workers))


def test_a_job_that_waits_says_what_for():
    """The line of a waiting job gives the reason."""
    assert describe_progress(WAITING) == "job-1 waiting: 1 of min 2 workers ready; waiting for gpu2"
    assert describe_progress(replace(WAITING, job=None)) == "waiting: 1 of min 2 workers ready; waiting for gpu2"
    assert describe_progress(replace(WAITING, phase="stopping", reason="")) == "job-1 stopping"


def test_a_job_that_has_ended_says_how():
    """The line of an ended job gives its outcome."""
    assert describe_progress(replace(RUNNING, outcome="failed")) == "job-1 failed"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"total": None}, "4 / 2–8 workers · step 1,203 · 55.1 steps/s"),
        ({"steps_per_second": None}, "4 / 2–8 workers · step 1,203 of 3,000"),
        ({"steps_per_second": 0.0}, "4 / 2–8 workers · step 1,203 of 3,000"),
        ({"max": None, "total": None}, "4 / 2+ workers · step 1,203 · 55.1 steps/s"),
        ({"min": 8, "total": None}, "4 / 8 workers · step 1,203 · 55.1 steps/s"),
        ({"steps_per_second": 0.25}, "4 / 2–8 workers · step 1,203 of 3,000 · 0.25 steps/s · 1:59:48 left"),
        ({"steps_per_second": 55.0}, "4 / 2–8 workers · step 1,203 of 3,000 · 55.0 steps/s · 0:33 left"),
        ({"step": 3000}, "4 / 2–8 workers · step 3,000 of 3,000 · 55.1 steps/s"),
        ({"step": 3001}, "4 / 2–8 workers · step 3,001 of 3,000 · 55.1 steps/s"),
        ({"step": 0}, "4 / 2–8 workers · step 0 of 3,000 · 55.1 steps/s · 0:55 left"),
    ],
)
def test_unknown_values_are_omitted(change, text):
    """The line omits an unknown total, speed or bound, and the remaining time after more steps than the total."""
    assert describe_progress(replace(RUNNING, report={}, **change)) == f"job-1 running · {text}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12345.0, "12,345"),
        (1234.5, "1,234"),
        (3.0, "3"),
        (0.00012345, "0.000123"),
        (1e-9, "1e-09"),
        (-0.5, "-0.5"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1e20, "1e+20"),
    ],
)
def test_a_reported_value_has_three_digits(value, text):
    """A reported value is shown with three digits."""
    assert describe_progress(replace(RUNNING, report={"loss": value})).endswith(f"left · loss {text}")


def test_a_line_that_is_too_long_is_cut():
    """A line that is too long is cut before the last column, and holds no control characters."""
    assert fit("12345678", 9) == "12345678"
    assert fit("123456789", 9) == "1234567…"
    assert len(fit("x" * 500, 80)) == 79
    assert fit("one\ntwo\x1b[2J", 80) == "one two [2J"
    assert fit("123", 1) == "…"
    assert fit("one · two", 8) == fit("one · two", 7) == "one…"
    assert [fit("损失 0.5", columns) for columns in (9, 8, 6)] == ["损失 0.5", "损失 0…", "损失…"]  # two columns each


# ---- the terminal ----


def test_only_a_terminal_shows_progress(stderr, monkeypatch, screen):
    """Progress is shown on a terminal only, not in files, notebooks or editors, nor on a closed stream."""
    assert terminal() is screen
    monkeypatch.setenv("TERM", "dumb")
    assert terminal() is None
    monkeypatch.delenv("TERM")
    assert terminal() is screen
    for other in (None, object(), io.StringIO()):
        stderr(other)
        assert terminal() is None
    closed = Terminal()
    closed.close()
    closed.isatty = lambda: io.StringIO.isatty(closed)
    stderr(closed)
    assert terminal() is None


def test_a_kernel_s_output_is_not_a_terminal():
    """ipykernel's replacement for the standard error reports that it is not a terminal, unless it was configured."""
    assert inspect.signature(OutStream).parameters["isatty"].default is False


def test_the_line_changes_at_most_four_times_a_second(screen):
    """The line is computed and shown at most four times a second, and cleared at the end."""
    now, asked = [100.0], []
    with ProgressLine(lambda: asked.append(now[0]) or f"at {now[0]}", screen, lambda: now[0]) as shown:
        for _ in range(9):
            shown.show()
            now[0] += 0.125
    assert asked == [100.0, 100.25, 100.5, 100.75, 101.0]
    assert screen.lines == ["at 100.0", "at 100.25", "at 100.5", "at 100.75", "at 101.0", ""]


def test_a_line_that_was_never_shown_is_not_cleared(screen):
    """Without a shown line nothing is cleared at the end."""
    with ProgressLine(lambda: "", screen):
        pass
    assert screen.getvalue() == ""


def test_the_width_is_the_terminal_s_own():
    """The width is that of the stream: COLUMNS and the standard output may give another one."""
    leader, follower = os.openpty()
    try:
        termios.tcsetwinsize(follower, (24, 20))
        with (
            open(follower, "w", encoding="utf-8", closefd=False) as stream,
            ProgressLine(lambda: "x" * 300, stream) as shown,
        ):
            shown.show()
        expected = "\r" + "x" * 18 + "…\x1b[K\r\x1b[K"
        shown_there = b""
        while len(shown_there) < len(expected.encode()):  # one read may return only the first of the two writes
            shown_there += os.read(leader, 4096)
        assert shown_there.decode() == expected
    finally:
        os.close(leader)
        os.close(follower)


@pytest.mark.usefixtures("screen")
def test_a_closed_terminal_does_not_end_the_wait(stderr):
    """After the terminal is closed, nothing is shown and the wait continues."""
    stderr(LostTerminal())
    future = Future()
    threading.Thread(target=future.set_result, args=([7],)).start()
    with ProgressLine(lambda: "text", terminal()) as shown:
        shown.show()
        assert shown.interval is None, "no terminal shows the line any more"
        assert wait_for_result(future, None, str, shown.show) == [7]


# ---- waiting ----


def test_a_wait_at_a_terminal_shows_progress(screen):
    """A wait at a terminal shows this job's progress, and not that of an earlier job."""
    job = job_of(replace(RUNNING, job="job-0"), WAITING, RUNNING)
    assert job.result() == [7]
    assert screen.lines == ["job-1 submitted", describe_progress(WAITING), describe_progress(RUNNING), ""]


def test_the_line_is_cleared_before_the_error_is_raised(screen):
    """The line is cleared before the job's error is raised."""
    job = job_of(RUNNING, end=lambda run: run.future.set_exception(JobError("job-1 failed: rank 0 raised")))
    with pytest.raises(JobError, match="rank 0 raised"):
        job.result()
    assert screen.lines == [describe_progress(RUNNING), ""]
    assert isinstance(job.wait().exception(), JobError)


def test_without_a_terminal_nothing_is_printed(stderr, capfd):
    """A wait without a terminal prints nothing."""
    file = io.StringIO()
    stderr(file)
    job = job_of()
    threading.Thread(target=job._copy.future.set_result, args=(packed(7),)).start()
    assert job.result() == asyncio.run(awaited(job)) == [7]
    assert (file.getvalue(), *capfd.readouterr()) == ("", "", "")


def test_the_error_of_a_timeout_has_the_reason():
    """The error of a wait that times out gives the reason why the cluster waits."""
    with pytest.raises(WaitTimeoutError, match="0 s were not enough for job-1: 1 of min 2 workers ready"):
        job_of(WAITING, end=lambda run: None).result(timeout=0)


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_job_s_own_timeout_error_is_raised(timeout):
    """A job's own TimeoutError is raised and not mistaken for a wait that timed out, which once waited without end."""
    future = Future()
    future.set_exception(TimeoutError("the store did not answer"))
    with pytest.raises(TimeoutError, match="the store did not answer"):
        wait_for_result(future, timeout, str)


def test_a_job_s_own_timeout_error_during_the_wait_is_raised():
    """A job's own TimeoutError that comes during the wait is raised too."""
    future = Future()
    with pytest.raises(TimeoutError, match="the store did not answer"):
        wait_for_result(future, None, str, lambda: future.set_exception(TimeoutError("the store did not answer")))


# ---- awaiting ----


async def awaited(job):
    return await job


def test_an_awaited_job_returns_its_result():
    """An awaited job returns its result, and the event loop runs meanwhile."""
    job = job_of()

    async def both():
        waiting = asyncio.ensure_future(awaited(job))
        await asyncio.sleep(0)  # `waiting` begins to wait
        threading.Thread(target=job._copy.future.set_result, args=(packed(1, 2),)).start()
        return await asyncio.gather(waiting, awaited(job))

    assert asyncio.run(both()) == [[1, 2], [1, 2]]
    assert asyncio.run(awaited(job)) == [1, 2], "an ended job can be awaited too"


@pytest.mark.parametrize("error", [JobError("rank 1 raised"), JobStoppedError("by hand"), TimeoutError("of its own")])
def test_an_awaited_job_raises_the_error_of_result(error):
    """An awaited job raises the same error as `result()`."""
    job = job_of()

    async def story():
        asyncio.get_running_loop().call_soon(job._copy.future.set_exception, error)
        await job

    with pytest.raises(type(error)) as caught:
        asyncio.run(story())
    assert caught.value is error


def test_a_cancelled_await_does_not_affect_the_job():
    """A cancelled or timed-out await, or a closed loop, does not affect the job."""
    job = job_of()

    async def story():
        waiting = asyncio.ensure_future(awaited(job))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(job, 0.001)

    asyncio.run(story())
    assert job.status == "running"
    assert not job._wakers, "no waker is left"
    job._copy.future.set_result(packed(7))
    assert job.result() == [7]


def test_a_job_can_end_after_the_loop_that_awaited_it_was_closed(caplog):
    """A job can end although the loop that awaited it was closed."""
    job = job_of()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(awaited(job))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    job._copy.future.set_result(packed(7))
    assert caplog.text == ""
    waiting._log_destroy_pending = False
    waiting.get_coro().close()


def test_an_await_at_a_terminal_shows_progress(screen):
    """An await at a terminal shows the job's progress."""
    assert asyncio.run(awaited(job_of(WAITING, RUNNING))) == [7]
    assert screen.lines == [describe_progress(WAITING), describe_progress(RUNNING), ""]


def test_the_line_is_updated_only_at_a_terminal(screen):
    """The line asks for an update four times a second on a terminal, and never without one."""
    assert ProgressLine(str, screen).interval == INTERVAL
    assert ProgressLine(str, None).interval is None
