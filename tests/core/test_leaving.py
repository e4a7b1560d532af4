"""Between the question where to leave and the last member's leaving: a fault at any moment costs one reset at most."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from tests.core.story import Story, wid, with_stage

MEMBERS = ("a/0#1", "b/0#1", "c/0#1")
NEWCOMER = "d/0#1"
SOME = list(chain.from_iterable(combinations(MEMBERS, size) for size in range(len(MEMBERS))))  # all but all of them


def dies(story: Story, w: str) -> None:
    story.kill(w)


def freezes(story: Story, w: str) -> None:
    story._forget(wid(w))
    story.send(ev.WorkerFrozen(wid(w), "stopped"))


def loses_its_host(story: Story, w: str) -> None:
    story.lose_host(w.partition("/")[0])


def loses_a_connection(story: Story, w: str) -> None:
    """It raises, and lives."""
    if w != NEWCOMER:
        story.hold_back(wid(w))
        story.raised(w, "RuntimeError: connection reset", intact=False)


def is_restarted(story: Story, w: str) -> None:
    story._forget(wid(w))
    story.send(ev.RestartRequested(wid(w), "a test"))


def is_cut_off(story: Story, w: str) -> None:
    """Nothing is heard of it for a minute; the others answer all the time."""
    story.hang(w)
    for seconds in (11.0, 61.0):
        story.quiet(seconds / 2)
        if wid(w) in story.cluster.workers:
            story.send(ev.WorkerSilent(wid(w), seconds, idle=True))


FAULTS = (dies, freezes, loses_its_host, loses_a_connection, is_restarted, is_cut_off)


def check_peace(story: Story, resets: int) -> None:
    """All four train, nobody has promised to stop, and nothing was lost but that many tries."""
    story.quiet(60.0).commit(3).quiet(60.0)
    assert (story.cluster.stage, len(story.names)) == (Stage.RUNNING, 4), story.reason
    assert story.cluster.resets <= resets
    assert {fake.generation for fake in story.fakes.values()} == {story.cluster.generation}
    assert not any(fake.bound for fake in story.fakes.values())
    story.commit(3).answer()
    assert story.cluster.stage is Stage.RUNNING


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("victim", [*MEMBERS, NEWCOMER])
@pytest.mark.parametrize("answered", SOME)
def test_a_fault_before_all_have_answered(answered, victim, fault):
    """Some have promised to stop, and wait for word of where to leave."""
    story = with_stage(Stage.ASKED)
    for w in answered:
        story.hear(ev.LeaveAcknowledged, w)
    fault(story, victim)
    check_peace(story, resets=1)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("victim", [*MEMBERS, NEWCOMER])
@pytest.mark.parametrize("left", SOME)
def test_a_fault_before_all_have_left(left, victim, fault):
    """Some have left at the agreed commit, and may be in the prepared generation already."""
    story = with_stage(Stage.LEAVING)
    for w in left:
        story.hear(ev.WorkerReady, w).hear(ev.WorkerFormed, w)
    fault(story, victim)
    check_peace(story, resets=1)


@pytest.mark.parametrize("first", FAULTS)
@pytest.mark.parametrize("second", FAULTS)
@pytest.mark.parametrize("stage", [Stage.ASKED, Stage.LEAVING])
def test_two_faults_at_once(stage, first, second):
    """A member that has answered, or left, and one that has not."""
    story = with_stage(stage)
    story.hear(ev.LeaveAcknowledged if stage is Stage.ASKED else ev.WorkerReady, "b/0#1")
    first(story, "b/0#1")
    if wid("c/0#1") in story.fakes:
        second(story, "c/0#1")
    check_peace(story, resets=2)
