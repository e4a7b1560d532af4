"""A fault at any moment between the question for a leave point and the last leaving costs at most one reset."""

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
    """The worker raises and lives."""
    if w != NEWCOMER:
        story.hold_back(wid(w))
        story.raised(w, "RuntimeError: connection reset", intact=False)


def is_restarted(story: Story, w: str) -> None:
    story._forget(wid(w))
    story.send(ev.RestartRequested(wid(w), "a test"))


def is_cut_off(story: Story, w: str) -> None:
    """The driver receives nothing from the worker for a minute; the other workers answer."""
    story.hang(w)
    for seconds in (11.0, 61.0):
        story.quiet(seconds / 2)
        if wid(w) in story.cluster.workers:
            story.send(ev.WorkerSilent(wid(w), seconds, idle=True))


FAULTS = (dies, freezes, loses_its_host, loses_a_connection, is_restarted, is_cut_off)


def check_all_train(story: Story, resets: int) -> None:
    """Asserts that all four train, none is bound to a leave point, and at most so many resets were counted."""
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
    """Some members have acknowledged the question and wait for the leave point when a fault happens."""
    story = with_stage(Stage.ASKED)
    for w in answered:
        story.hear(ev.LeaveAcknowledged, w)
    fault(story, victim)
    check_all_train(story, resets=1)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("victim", [*MEMBERS, NEWCOMER])
@pytest.mark.parametrize("left", SOME)
def test_a_fault_before_all_have_left(left, victim, fault):
    """Some members have left at the leave point, or have entered the next generation, when a fault happens."""
    story = with_stage(Stage.LEAVING)
    for w in left:
        story.hear(ev.WorkerReady, w).hear(ev.WorkerFormed, w)
    fault(story, victim)
    check_all_train(story, resets=1)


@pytest.mark.parametrize("first", FAULTS)
@pytest.mark.parametrize("second", FAULTS)
@pytest.mark.parametrize("stage", [Stage.ASKED, Stage.LEAVING])
def test_two_faults_at_once(stage, first, second):
    """A fault hits a member that has answered or left, and a member that has not."""
    story = with_stage(stage)
    story.hear(ev.LeaveAcknowledged if stage is Stage.ASKED else ev.WorkerReady, "b/0#1")
    first(story, "b/0#1")
    if wid("c/0#1") in story.fakes:
        second(story, "c/0#1")
    check_all_train(story, resets=2)
