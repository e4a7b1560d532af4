"""A program that waits in the debugger holds up the others, who are not to blame for it, nor is it."""

from __future__ import annotations

import pytest

from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from nbelastic.protocol.program_events import BreakpointLeft, BreakpointReached
from tests.core.story import Story, wid, with_stage

W = wid("b/0#1")


def reach(story: Story, number: int = 1) -> Story:
    story.send(BreakpointReached(W, number, "train.py:9 in step", "-> x = 1\n(Pdb) "))
    return story


def test_an_event_says_where_it_waits():
    """Once, however many lines the user steps through. It shows in the status until the program goes on."""
    story = reach(reach(with_stage(Stage.RUNNING)), 2)
    assert story.records("breakpoint") == ["rank 1 (b/0#1) waits at a breakpoint in train.py:9 in step: %elastic_debug"]
    assert story.cluster.workers[W].breakpoint_at == "train.py:9 in step"
    story.send(BreakpointLeft(W))
    assert not story.cluster.workers[W].breakpoint_at


def test_a_breakpoint_is_no_stall():
    """The core judges no member and replaces none, for as long as the user thinks."""
    story = reach(with_stage(Stage.RUNNING, stall=2.0))
    for seconds in (3.0, 60.0, 3600.0):
        story.send(ev.StallDetected(story.cluster.generation, seconds))
        story.quiet(60.0)
    assert story.cluster.stall is None
    assert {*map(str, story.cluster.members)} == {"a/0#1", "b/0#1", "c/0#1"}


def test_a_breakpoint_whose_place_is_not_known_counts():
    """Such as one in code that has no file."""
    story = with_stage(Stage.RUNNING)
    story.send(BreakpointReached(W, 1, "", "(Pdb) "))
    assert story.cluster.workers[W].breakpoint_at == "the program"


@pytest.mark.parametrize("stage", [Stage.LEAVING, Stage.HALTED])
def test_others_that_wait_for_it_replace_no_member(stage):
    """They have come to an agreed commit; the deadline of that begins again until the program goes on."""
    story = with_stage(Stage.RUNNING)
    story.send(ev.PauseRequested("you"))
    story.hear(ev.LeaveAcknowledged)
    if stage is Stage.HALTED:
        story.hear(ev.WorkerHalted, "a/0#1", "c/0#1")
    reach(story).silent.add(W)
    story.wait(3600.0)
    assert W in story.cluster.members
    story.silent.clear()
    story.send(BreakpointLeft(W))
    story.answer()
    assert story.cluster.phase == "paused"


def test_a_worker_that_waits_for_a_world_has_left_the_debugger():
    """Also if it did not report that: pdb steps over a `yield` without stopping, and the world may break in that step.

    Else each deadline would begin again without end: here a world whose members do not connect.
    """
    story = Story("a:1", "b:1", "c:1", "d:1", min=2, max=3, cooldown=(0.0, 0.0)).run().commit(5)
    reach(story).kill("a/0#1").hear(ev.WorkerReady)
    assert story.cluster.stage is Stage.FORMING
    assert not story.cluster.workers[W].breakpoint_at
    story.hang("c/0#1").quiet(600.0)
    assert W in story.cluster.members
    assert story.cluster.stage is Stage.RUNNING, story.reason


def test_others_wait_for_a_breakpoint_in_a_reset_callback():
    """There the group has formed: no member is late, and the user may think for as long as they like."""
    story = with_stage(Stage.FORMING)
    reach(story).hang(str(W)).quiet(3600.0)
    assert story.cluster.stage is Stage.FORMING
    assert W in story.cluster.members
    story.silent.clear()
    story.send(BreakpointLeft(W), ev.WorkerFormed(W, story.cluster.generation))
    assert story.cluster.stage is Stage.RUNNING, story.reason
