"""Workers are unresponsive although their processes run."""

from __future__ import annotations

from nbelastic.core import commands as cmd
from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from tests.core.story import Story, wid

LIMITS = {"min": 1, "cooldown": (0.0, 0.0)}


def silent(story: Story, seconds: float, **how) -> tuple[cmd.Command, ...]:
    """The driver reports that worker `b` is unresponsive."""
    return story.send(ev.WorkerSilent(wid("b/0#1"), seconds, **how))


def test_an_unresponsive_rank_whose_process_runs_is_left_alone():
    """A held interpreter lock makes a rank unresponsive: it keeps its place, and the status names the cause."""
    story = Story("a:1", "b:1", **LIMITS).run()
    silent(story, 14.0)
    silent(story, 15.0)
    text = "no message from it for 15 s though its host answers; its process runs"
    assert story.cluster.workers[wid("b/0#1")].unresponsive == text
    assert len(story.records("worker-silent")) == 1
    story.stand_still(times=0).send(ev.StallDetected(story.cluster.generation, 6.0))
    story.hear(ev.PositionReported, "a/0#1")
    story.send(ev.StallDetected(story.cluster.generation, 7.0))
    assert f"rank 1 (b/0#1): {text}" in story.reason
    story.send(ev.WorkerResponded(wid("b/0#1")))
    assert not story.cluster.workers[wid("b/0#1")].unresponsive
    assert story.cluster.stage is Stage.RUNNING
    assert story.names == ["a/0#1", "b/0#1"]


def test_a_process_that_computes_may_be_silent_for_ten_minutes():
    """An unresponsive worker that uses CPU is replaced after ten minutes, and the others resume from the last commit."""
    story = Story("a:1", "b:1", **LIMITS).run()
    assert silent(story, 599.0) == () or not story.commands(cmd.StopWorker)
    silent(story, 600.0)
    assert story.last(cmd.StopWorker) == cmd.StopWorker(wid("b/0#1"), kill=True)
    (text,) = story.records("worker-lost")
    assert text == "b/0#1 froze (no message from it for 600 s though its host answers; its process runs)"
    story.quiet(2.0)
    assert story.names == ["a/0#1", "b/0#2"]


def test_a_process_that_does_nothing_may_be_silent_for_a_minute():
    """An unresponsive worker without CPU use is replaced after a minute, as it may be deadlocked."""
    story = Story("a:1", "b:1", **LIMITS).run()
    silent(story, 59.0, idle=True)
    assert not story.commands(cmd.StopWorker)
    silent(story, 60.0, idle=True)
    assert story.records("worker-lost")[0].endswith("its process uses no CPU time)")


def test_stall_bounds_the_wait_for_an_unresponsive_rank():
    """`stall` bounds the wait for an unresponsive rank, as for any other rank."""
    story = Story("a:1", "b:1", stall=20.0, **LIMITS).run()
    silent(story, 19.0)
    assert not story.commands(cmd.StopWorker)
    silent(story, 20.0)
    assert story.last(cmd.StopWorker).worker == wid("b/0#1")


def test_uninterruptible_sleep_is_named():
    """The reason names a process that hangs in a driver or file system."""
    story = Story("a:1", "b:1", **LIMITS).run()
    silent(story, 61.0, idle=True, state="is in uninterruptible sleep (D) for 60 s")
    assert story.records("worker-lost")[0].endswith("its process is in uninterruptible sleep (D) for 60 s)")


def test_a_worker_that_was_asked_to_end_is_left_to_its_agent():
    """The core does not kill a worker that was asked to end: its agent does."""
    story = Story("a:1", "b:1", **LIMITS).answer()
    story.scale(1, 1)
    w = wid("b/0#1")
    assert w in story.cluster.stopped
    assert silent(story, 1000.0) == ()
