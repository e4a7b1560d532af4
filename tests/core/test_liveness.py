"""Workers of which nothing is heard although their processes run."""

from __future__ import annotations

from nbelastic.core import commands as cmd
from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from tests.core.story import Story, wid

LIMITS = {"min": 1, "cooldown": (0.0, 0.0)}


def silent(story: Story, seconds: float, **how) -> tuple[cmd.Command, ...]:
    """The driver sends that nothing is heard of `b`."""
    return story.send(ev.WorkerSilent(wid("b/0#1"), seconds, **how))


def test_a_rank_that_is_silent_while_its_process_runs_is_left_alone():
    """Something holds Python's interpreter lock: the rank keeps its place, and the status says what is known of it."""
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
    """Then it is replaced, and the others go on from the last commit."""
    story = Story("a:1", "b:1", **LIMITS).run()
    assert silent(story, 599.0) == () or not story.commands(cmd.StopWorker)
    silent(story, 600.0)
    assert story.last(cmd.StopWorker) == cmd.StopWorker(wid("b/0#1"), kill=True)
    (text,) = story.records("worker-lost")
    assert text == "b/0#1 froze (no message from it for 600 s though its host answers; its process runs)"
    story.quiet(2.0)
    assert story.names == ["a/0#1", "b/0#2"]


def test_a_process_that_does_nothing_may_be_silent_for_a_minute():
    """It may be deadlocked, and nothing would ever wake it."""
    story = Story("a:1", "b:1", **LIMITS).run()
    silent(story, 59.0, idle=True)
    assert not story.commands(cmd.StopWorker)
    silent(story, 60.0, idle=True)
    assert story.records("worker-lost")[0].endswith("its process uses no CPU time)")


def test_stall_says_how_long_a_silent_rank_is_waited_for():
    """As it does for any other rank for which the others wait."""
    story = Story("a:1", "b:1", stall=20.0, **LIMITS).run()
    silent(story, 19.0)
    assert not story.commands(cmd.StopWorker)
    silent(story, 20.0)
    assert story.last(cmd.StopWorker).worker == wid("b/0#1")


def test_uninterruptible_sleep_is_named():
    """A driver or a file system that hangs is told as such, as nothing in the process can help."""
    story = Story("a:1", "b:1", **LIMITS).run()
    silent(story, 61.0, idle=True, state="is in uninterruptible sleep (D) for 60 s")
    assert story.records("worker-lost")[0].endswith("its process is in uninterruptible sleep (D) for 60 s)")


def test_a_worker_that_was_told_to_end_is_its_agents_business():
    """The agent kills it when it does not end by itself."""
    story = Story("a:1", "b:1", **LIMITS).answer()
    story.scale(1, 1)
    w = wid("b/0#1")
    assert w in story.cluster.stopped
    assert silent(story, 1000.0) == ()
