"""Workers that no abort wakes: who alone holds the training state keeps it for its successor before it ends."""

from __future__ import annotations

from nbelastic.core import messages as m
from nbelastic.core.world import Kept, Stage
from tests.core.away import Away, trains
from tests.core.story import Story, wid

A, B, C = "a/0#1", "b/0#1", "c/0#1"


def survivor(*hosts: str, **limits) -> Story:
    """Two train, up to commit 7; one is killed, and the other, on `a`, sleeps in the collective that this breaks."""
    limits = {"min": 2, "max": 2, "elastic_timeout": 100.0} | limits
    story = Story(*(hosts or ("a", "b")), **limits).run().commit(7)
    return story.stick(A).kill(B)


def test_the_only_one_with_the_state_keeps_it_for_its_successor():
    """It asks, keeps the state and ends; the next worker of its host takes it, and no committed step is lost."""
    story = survivor()
    story.hear(m.WorkerStuck)
    assert story.last(m.EndStuck) == m.EndStuck(wid(A), keep=True)
    story.quiet(5.0)
    assert len(story.records("state-kept")) == 1
    assert not story.commands(m.EndJob)
    assert trains(story, "a/0#2", "b/0#2")
    assert [story.fakes[w].commit for w in story.world.members] == [7, 7]
    assert story.world.kept is None
    story.commit(3).finish()


def test_while_another_has_the_state_nothing_is_kept():
    """Of three, two survive, and one of them is stuck: it just ends."""
    story = Story("a", "b", "c", min=2).run().commit(7)
    story.stick(A).kill(B).quiet(5.0)
    assert [answer.keep for answer in story.commands(m.EndStuck)] == [False]
    assert not story.records("state-kept")
    assert trains(story)
    assert story.fakes[wid(C)].commit == 7


def test_of_two_that_are_stuck_one_keeps_the_state():
    """The first is told to end, as the other has the state too; so the other keeps it."""
    story = Story("a", "b", "c", min=2).run().commit(7)
    story.stick(A).stick(C).kill(B)
    story.quiet(5.0)
    assert [answer.keep for answer in story.commands(m.EndStuck)] == [False, True, False]
    assert trains(story)
    assert {story.fakes[w].commit for w in story.world.members} == {7}


def test_newcomers_wait_for_the_successor():
    """Enough others are ready, without the state: no world forms without it, and none of them takes its place."""
    story = survivor("a", "b", "c", spares=1)
    story.silent.add(wid("a/0#2"))
    mark = story.mark()
    story.quiet(5.0)
    assert story.world.kept == Kept("a", 7)
    assert not story.commands(m.FormWorld, mark)
    assert "is kept on a, for a worker there" in story.world.reason


def test_a_successor_is_started_before_all_others():
    """Others are free for the same place, on hosts that came earlier."""
    story = Story("a", "b", min=2, max=2, elastic_timeout=100.0).run().commit(7)
    story.add("c:4").quiet(1.0)
    story.remove("b", now=True)
    story.quiet(1.0)
    story.stick(A)
    story.kill(next(name for name in story.names if name != A))
    story.quiet(5.0)
    assert "a/0#2" in story.names
    assert trains(story)


def test_no_successor_comes_and_the_job_ends():
    """After `elastic_timeout`, and in words."""
    story = survivor()
    story.hear(m.WorkerStuck).hear(m.StateKept)
    story.send(m.HostAdded(m.HostSpec("c", 2), "a test"))
    story.silent |= {wid(f"a/0#{n}") for n in range(2, 100)}
    story.quiet(2000.0)
    assert story.commands(m.EndJob)[0].outcome == "failed"
    assert "kept on a" in story.commands(m.EndJob)[0].reason


def test_the_host_that_keeps_the_state_is_lost():
    """The state went with it: the job ends at once and says so."""
    story = survivor()
    story.hear(m.WorkerStuck).hear(m.StateKept).hear(m.WorkerExited)
    assert story.world.kept == Kept("a", 7)
    story.lose_host("a")
    assert story.last(m.EndJob).reason == "the training state was kept on a, which is gone"
    assert story.world.kept is None


def test_a_successor_that_dies_leaves_the_state_to_the_next():
    """Until a world has formed with it the state stays on the disk."""
    story = survivor(cooldown=(0.0, 0.0))
    story.answer(lambda e: not isinstance(e, m.WorkerFormed))
    assert story.world.stage is Stage.FORMING, story.world.reason
    story.kill("a/0#2").quiet(5.0)
    assert trains(story)
    assert {story.fakes[w].commit for w in story.world.members} == {7}


def test_a_new_driver_knows_what_is_kept():
    """The driver dies between the keeping and the successor: nothing is lost."""
    story = survivor()
    story.hear(m.WorkerStuck).hear(m.StateKept).hear(m.WorkerExited)
    Away(story).new_driver()
    story.quiet(5.0)
    assert trains(story)
    assert {story.fakes[w].commit for w in story.world.members} == {7}


def test_a_new_driver_is_asked_again():
    """The driver dies before it has answered who is stuck."""
    story = survivor()
    Away(story).new_driver()
    story.quiet(5.0)
    assert trains(story)
    assert {story.fakes[w].commit for w in story.world.members} == {7}


def test_a_job_that_is_over_keeps_nothing():
    """Stopped while somebody is stuck: it ends, and the next job begins anew."""
    story = survivor()
    story.hear(m.WorkerStuck)
    story.stop_job()
    story.quiet(5.0)
    assert story.world.kept is None
    story.run("second").commit(1).finish()
