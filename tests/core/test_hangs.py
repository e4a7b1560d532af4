"""Workers that no abort wakes: who alone holds the training state keeps it for its successor before it ends."""

from __future__ import annotations

import msgspec

from nbelastic.core import commands as cmd
from nbelastic.core.state import KeptState, Stage
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec
from tests.core.away import Away, trains
from tests.core.story import FakeWorker, Story, wid

A, B, C = "a/0#1", "b/0#1", "c/0#1"


def survivor(*hosts: str, **limits) -> Story:
    """Two train, up to commit 7; one is killed, and the other, on `a`, sleeps in the collective that this breaks."""
    limits = {"min": 2, "max": 2, "elastic_timeout": 100.0} | limits
    story = Story(*(hosts or ("a", "b")), **limits).run().commit(7)
    return story.stick(A).kill(B)


def nothing_lost(story: Story, commit: int = 7) -> bool:
    """All are at least at this commit."""
    return min(story.fakes[w].commit for w in story.cluster.members) >= commit


def test_the_only_one_with_the_state_keeps_it_for_its_successor():
    """It asks, keeps the state and ends; the next worker of its host takes it, and no committed step is lost."""
    story = survivor()
    story.hear(ev.WorkerHung)
    assert story.last(cmd.EndHungWorker) == cmd.EndHungWorker(wid(A), keep=True)
    story.quiet(5.0)
    assert len(story.records("state-kept")) == 1
    assert not story.commands(cmd.EndJob)
    assert trains(story, "a/0#2", "b/0#2")
    assert nothing_lost(story)
    assert story.cluster.kept_state is None
    story.commit(3).finish()


def test_while_another_has_the_state_nothing_is_kept():
    """Of three, two survive, and one of them is stuck: it just ends."""
    story = Story("a", "b", "c", min=2).run().commit(7)
    story.stick(A).kill(B).quiet(5.0)
    assert {answer.keep for answer in story.commands(cmd.EndHungWorker)} == {False}
    assert not story.records("state-kept")
    assert trains(story)
    assert story.fakes[wid(C)].commit == 7


def test_of_two_that_are_stuck_one_keeps_the_state():
    """The first of them; when that is safe, the other just ends."""
    story = Story("a", "b", "c", min=2).run().commit(7)
    story.stick(A).stick(C).kill(B)
    story.quiet(5.0)
    assert {(answer.worker, answer.keep) for answer in story.commands(cmd.EndHungWorker)} == {
        (wid(A), True),
        (wid(A), False),
        (wid(C), False),
    }
    assert trains(story)
    assert nothing_lost(story)


def test_newcomers_wait_for_the_successor():
    """Enough others are ready, without the state: no world forms without it, and none of them takes its place."""
    story = survivor("a", "b", "c", spares=1)
    story.silent.add(wid("a/0#2"))
    mark = story.mark()
    story.quiet(5.0)
    assert story.cluster.kept_state == KeptState(wid(A), 7)
    assert not story.commands(cmd.FormWorld, mark)
    assert "is kept on a, for a worker there" in story.reason


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
    story.hear(ev.WorkerHung).hear(ev.StateKept)
    story.send(ev.HostAdded(HostSpec("c", 2), "a test"))
    story.silent |= {wid(f"a/0#{n}") for n in range(2, 100)}
    story.quiet(2000.0)
    assert story.commands(cmd.EndJob)[0].outcome == "failed"
    assert "kept on a" in story.commands(cmd.EndJob)[0].reason


def test_the_host_that_keeps_the_state_is_lost():
    """The state went with it: the job ends at once and says so."""
    story = survivor()
    story.hear(ev.WorkerHung).hear(ev.StateKept).hear(ev.WorkerExited)
    assert story.cluster.kept_state == KeptState(wid(A), 7)
    story.lose_host("a")
    assert story.last(cmd.EndJob).reason == "the training state was kept on a, which was lost"
    assert story.cluster.kept_state is None


def test_a_successor_that_dies_leaves_the_state_to_the_next():
    """Until a world has formed with it the state stays on the disk."""
    story = survivor(cooldown=(0.0, 0.0))
    story.answer(lambda e: not isinstance(e, ev.WorkerFormed))
    assert story.cluster.stage is Stage.FORMING, story.reason
    story.kill("a/0#2").quiet(5.0)
    assert trains(story)
    assert nothing_lost(story)


def test_a_new_driver_knows_what_is_kept():
    """The driver dies between the keeping and the successor: nothing is lost."""
    story = survivor()
    story.hear(ev.WorkerHung).hear(ev.StateKept).hear(ev.WorkerExited)
    Away(story).new_driver()
    story.quiet(5.0)
    assert trains(story)
    assert nothing_lost(story)


def test_a_new_driver_is_asked_again():
    """The driver dies before it has answered who is stuck."""
    story = survivor()
    Away(story).new_driver()
    story.quiet(5.0)
    assert trains(story)
    assert nothing_lost(story)


def test_a_job_that_is_over_keeps_nothing():
    """Stopped while somebody is stuck: it ends, and the next job begins anew."""
    story = survivor()
    story.hear(ev.WorkerHung)
    story.stop_job()
    story.quiet(5.0)
    assert story.cluster.kept_state is None
    story.run("second").commit(1).finish()


def test_who_is_not_told_to_keep_it_never_holds_it():
    """A spare on the same host waits beside the training: it takes nothing, and no older commit comes back."""
    story = Story("a:3", min=2, max=2, spares=1, elastic_timeout=100.0).run().commit(7)
    first, second = story.names
    story.stick(first).kill(second).quiet(5.0)
    assert trains(story)
    story.commit(5000).quiet(1.0)
    first, second = story.names
    mark = story.mark()
    story.stick(first).kill(second).quiet(5.0)
    assert story.commands(cmd.LoadKeptState, mark)[0].commit == 5007
    assert trains(story)
    assert nothing_lost(story, 5007)


def test_without_its_members_a_state_is_lost_though_spares_held_one():
    """Who has been left out of a world does not hold the newest state any more: the job does not silently go back."""
    story = survivor("a", "b", "c", spares=1)
    story.quiet(5.0)
    story.commit(5000)
    story.kill(*story.names)
    assert story.last(cmd.EndJob).outcome == "failed"


def test_a_world_that_formed_without_a_driver_needs_nothing_from_the_disk():
    """The driver dies as the world forms with the state that was kept; the next one knows nothing of it any more."""
    story = survivor()
    story.answer(lambda e: not isinstance(e, ev.WorkerFormed))
    assert story.cluster.kept_state is not None
    away = Away(story).form()
    away.commit(5000).new_driver()
    story.quiet(5.0)
    assert trains(story)
    assert (story.cluster.kept_state, story.kept) == (None, {})
    first, second = story.names
    story.stick(first).kill(second).quiet(5.0)
    assert nothing_lost(story, 5007)


def test_a_question_waits_for_those_who_have_not_left():
    """Who has been heard last may be dead: two hosts fail at once, and the second one's end is noticed later."""
    story = Story("a", "b", "c", min=1, elastic_timeout=100.0).run().commit(7)
    story.stick(A).kill(B)
    story.silent.add(wid(C))
    story._unsay(wid(C), ev.WorkerReady)
    story.hear(ev.WorkerHung)
    assert not story.commands(cmd.EndHungWorker)
    story.lose_host("c").quiet(5.0)
    assert len(story.records("state-kept")) == 1
    assert trains(story)
    assert nothing_lost(story)


def test_who_wakes_up_after_all_still_holds_its_state():
    """It was told to end, and has moved meanwhile; then the other one dies."""
    story = Story("a", "b", "c", min=1, elastic_timeout=100.0).run().commit(7)
    story.stick(A).kill(B)
    story.hear(ev.WorkerReady, C).hear(ev.WorkerHung)
    assert story.last(cmd.EndHungWorker) == cmd.EndHungWorker(wid(A))
    story.stuck.clear()
    story.answers = [e for e in story.answers if not isinstance(e, ev.WorkerExited)]
    story.fakes[wid(A)] = FakeWorker(
        "job", left=story.cluster.generation, commit=7, holds=True, since=story.cluster.generation
    )
    story.kill(C)
    assert not story.commands(cmd.EndJob)
    story._say_ready(wid(A))
    story.quiet(5.0)
    assert trains(story)
    assert nothing_lost(story)


def kept(story: Story) -> Story:
    return story.hear(ev.WorkerHung).hear(ev.StateKept).hear(ev.WorkerExited)


def goes_on(story: Story) -> None:
    """With the state that was kept, and nobody too many."""
    story.quiet(20.0)
    assert trains(story), story.reason
    assert nothing_lost(story)
    assert (story.cluster.kept_state, story.kept) == (None, {})


def test_fewer_workers_are_wanted_while_the_successor_starts():
    """It is the youngest, and is started all the same."""
    story = kept(survivor(elastic_timeout=None))
    story.hear(ev.WorkerReady, *(name for name in story.alive() if name.startswith("b")))
    story.scale(1, 1)
    goes_on(story)
    assert story.names == ["a/0#2"]


def test_a_successor_whose_slot_backs_off_is_waited_for():
    """Another host takes its place meanwhile: one worker more than wanted lives, until the world has formed."""
    story = kept(survivor("a", "b", "c:4", elastic_timeout=None))
    story.kill("a/0#2").kill("a/0#3")
    goes_on(story)


def test_the_last_holder_was_to_leave():
    """It was above `max`, so its place is not filled otherwise."""
    story = Story("b", "a", min=1, max=2, elastic_timeout=None).run().commit(7)
    story.answers = []
    story.send(ev.Scaled(1, 1, "a test"))
    story.stick(A).kill(B)
    goes_on(story)


def test_the_host_of_the_last_holder_drains():
    """It stays until another host has the state: one that lists it no more loses nothing."""
    story = Story("a", "b", "c", min=2, max=2, elastic_timeout=None).run().commit(7)
    story.stick(A).remove("a").kill(B)
    goes_on(story)
    assert "a" not in story.cluster.hosts


def test_the_slot_of_the_last_holder_is_gone():
    """A worker that waits in another slot of its host reads what was kept."""
    story = Story("a:2", "b", min=1, max=2, spares=1, elastic_timeout=None).run()
    story.kill("a/0#1").quiet(3.0).commit(7)
    story.fakes[wid("a/1#1")].commit = story.fakes[wid("b/0#1")].commit = 7
    story.stick("a/1#1")
    other = next(name for name in story.names if name != "a/1#1")
    story.send(ev.HostAdded(HostSpec("a", 1), "a test"))
    story.kill(other)
    goes_on(story)


def test_a_large_state_may_take_its_time():
    """While it says that it is at it, nobody gives it up."""
    story = survivor(elastic_timeout=30.0)
    story.hear(ev.WorkerHung)
    story.answers = [e for e in story.answers if not isinstance(e, ev.StateKept)]
    for _ in range(100):
        story.send(ev.WorkerHung(wid(A), story.cluster.generation, 7, keeping=True))
        story.wait(5.0)
    assert not story.commands(cmd.EndJob)
    story.send(ev.StateKept(wid(A), "job", 7))
    goes_on(story)


# ---- and what two readers thought of ----


def test_the_agent_that_keeps_the_state_dies_while_no_driver_is_there():
    """Its folder went with it: the next driver ends the job, and does not look for the state in another agent's."""
    story = kept(survivor())
    away = Away(story)
    away.lose_host("a")
    away.new_driver()
    story.quiet(20.0)
    assert story.last(cmd.EndJob).outcome == "failed"
    assert not story.commands(cmd.LoadKeptState)


def test_a_draining_host_without_an_agent_starts_nothing():
    """The same while it was to leave: no worker is started there again and again."""
    story = Story("a", "b", "c", min=2, max=2, elastic_timeout=None).run().commit(7)
    kept(story.stick(A).remove("a").kill(B))
    away = Away(story)
    away.lose_host("a")
    mark = story.mark()
    away.new_driver()
    story.quiet(50.0)
    assert story.last(cmd.EndJob).outcome == "failed"
    assert not [command for command in story.commands(cmd.StartWorker, mark) if command.worker.host == "a"]


def test_a_spare_s_old_claim_is_not_believed():
    """It had the state once, and worlds have formed without it: by no way does its commit come back."""
    story = Story("a", "b", "c", min=2, max=2, spares=1, elastic_timeout=100.0).run().commit(5007)
    spare = wid(C)
    story.fakes[spare].holds, story.fakes[spare].since, story.fakes[spare].commit = True, 0, 3
    story._say_ready(spare)
    story.answer()
    assert not story.cluster.workers[spare].has_state
    Away(story).new_driver()
    assert not story.cluster.workers[spare].has_state
    story.kill(*story.names)
    assert story.last(cmd.EndJob).outcome == "failed"


def test_an_heir_that_could_not_join_before_is_taken_all_the_same():
    """Without it no world can form, however many fresh ones wait."""
    story = kept(survivor("a", "b", "c", spares=1))
    story.answer(lambda e: not (isinstance(e, ev.WorkerReady) and e.holds_state))
    heir = story.cluster.kept_state.reader
    workers = story.cluster.workers
    story.cluster = msgspec.structs.replace(
        story.cluster, workers=workers | {heir: msgspec.structs.replace(workers[heir], failures=1)}
    )
    goes_on(story)
    assert str(heir) in story.names


def test_a_survivor_without_the_state_reads_it():
    """The heir has died as it sent the state; the only other worker of the host was receiving it, and reads it now."""
    story = Story("a:2", "c", min=2, max=2, elastic_timeout=None).run()
    first, second = story.names
    story.commit(7)
    kept(story.stick(first).kill(second))
    story.answer(lambda e: not isinstance(e, ev.WorkerFormed))
    assert story.cluster.stage is Stage.FORMING, story.reason
    heir, receiver = (
        story.cluster.kept_state.reader,
        next(w for w in story.cluster.members if w != story.cluster.kept_state.reader),
    )
    story.tear(str(receiver))
    story.kill(str(heir))
    goes_on(story)


def test_a_newer_state_is_kept_in_the_place_of_an_older_one():
    """The world has formed and trained before the driver knew, and is stuck again: what is on the disk is old."""
    story = kept(survivor())
    story.answer(lambda e: not isinstance(e, ev.WorkerFormed))
    heir = story.cluster.kept_state.reader
    other = next(w for w in story.cluster.members if w != heir)
    for w in (heir, other):
        story.fakes[w].commit = 107
    story.answers = [e for e in story.answers if not isinstance(e, ev.WorkerFormed)]
    story.hear_of(ev.WorkerFormed(heir, story.cluster.generation))
    story.stick(str(heir)).kill(str(other))
    story.quiet(5.0)
    assert trains(story)
    assert nothing_lost(story, 107)


def test_a_job_that_ends_lets_the_host_go_that_has_kept_its_state():
    """It was only there for that."""
    story = Story("a", "b", "c", min=2, max=2, elastic_timeout=None).run().commit(7)
    kept(story.stick(A).remove("a").kill(B))
    assert "a" in story.cluster.hosts
    story.stop_job()
    story.quiet(5.0)
    assert "a" not in story.cluster.hosts
    assert story.kept == {}


def test_a_state_that_cannot_be_read_ends_the_job():
    """Damaged, on a disk that is full: nobody waits for one that will not come."""
    story = kept(survivor(elastic_timeout=None))
    story.answer(lambda e: not (isinstance(e, ev.WorkerReady) and e.holds_state))
    heir = story.cluster.kept_state.reader
    story.ended(str(heir), error="StateError: it is damaged")
    end = story.last(cmd.EndJob)
    assert (end.outcome, end.culprit) == ("failed", heir)
    assert end.reason == f"{heir} could not read the training state that {A} has kept: StateError: it is damaged"


def test_who_keeps_a_state_that_is_safe_already_leaves_nothing_behind():
    """Two have kept the same commit, as the first one's word came late."""
    story = kept(survivor())
    story.send(ev.StateKept(wid("b/0#2"), "job", 7))
    assert story.commands(cmd.DeleteKeptState) == [cmd.DeleteKeptState(wid("b/0#2"))]
    assert story.cluster.kept_state.by == wid(A)
