"""The training state that a hung worker has kept on disk reaches the next generation."""

from __future__ import annotations

import msgspec

from nbelastic.core import commands as cmd
from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec
from tests.core.away import Away, trains
from tests.core.hung import A, B, C, nothing_lost, survivor
from tests.core.story import Story, wid


def kept(story: Story) -> Story:
    return story.hear(ev.WorkerHung).hear(ev.StateKept).hear(ev.WorkerExited)


def assert_trains_with_kept_state(story: Story) -> None:
    """Asserts that the job trains with the kept state and one worker per place."""
    story.quiet(20.0)
    assert story.commands(cmd.LoadKeptState)
    assert trains(story), story.reason
    assert nothing_lost(story)
    assert (story.cluster.kept_state, story.kept) == (None, {})


def test_fewer_workers_are_wanted_while_the_successor_starts():
    """Scaling down does not stop the successor, although it is the youngest worker."""
    story = kept(survivor(elastic_timeout=None))
    story.hear(ev.WorkerReady, *(name for name in story.alive() if name.startswith("b")))
    story.scale(1, 1)
    assert_trains_with_kept_state(story)
    assert story.names == ["a/0#2"]


def test_a_successor_whose_slot_backs_off_is_waited_for():
    """While the successor's slot is in back-off, one surplus worker lives until the world has formed."""
    story = kept(survivor("a", "b", "c:4", elastic_timeout=None))
    story.kill("a/0#2").kill("a/0#3")
    assert "waiting for a/0 (in back-off" in story.answer().reason
    assert_trains_with_kept_state(story)


def test_the_last_holder_was_to_leave():
    """The hung worker was above `max`: its successor starts all the same."""
    story = Story("b", "a", min=1, max=2, elastic_timeout=None).run().commit(7)
    story.answers = []
    story.send(ev.Scaled(1, 1, "a test"))
    story.stick(A).kill(B)
    assert_trains_with_kept_state(story)


def test_the_host_of_the_last_holder_drains():
    """A draining host stays until another host holds the state."""
    story = Story("a", "b", "c", min=2, max=2, elastic_timeout=None).run().commit(7)
    story.stick(A).remove("a").kill(B)
    assert_trains_with_kept_state(story)
    assert "a" not in story.cluster.hosts


def test_the_slot_of_the_last_holder_is_gone():
    """The slot of the hung worker is removed: a worker in another slot of the host loads the kept state."""
    story = Story("a:2", "b", min=1, max=2, spares=1, elastic_timeout=None).run()
    story.kill("a/0#1").quiet(3.0).commit(7)
    story.fakes[wid("a/1#1")].commit = story.fakes[wid("b/0#1")].commit = 7
    story.stick("a/1#1")
    other = next(name for name in story.names if name != "a/1#1")
    story.send(ev.HostAdded(HostSpec("a", 1), "a test"))
    story.kill(other)
    assert_trains_with_kept_state(story)


def test_a_large_state_may_take_its_time():
    """The driver waits for a hung worker that reports that it is still writing the state."""
    story = survivor(elastic_timeout=30.0)
    story.hear(ev.WorkerHung)
    story.answers = [e for e in story.answers if not isinstance(e, ev.StateKept)]
    for _ in range(100):
        story.send(ev.WorkerHung(wid(A), story.cluster.generation, 7, keeping=True))
        story.wait(5.0)
    assert not story.commands(cmd.EndJob)
    story.send(ev.StateKept(wid(A), "job", 7))
    assert_trains_with_kept_state(story)


# ---- and what two readers thought of ----


def test_the_agent_that_keeps_the_state_dies_while_no_driver_is_there():
    """The agent with the kept state is lost without a driver: the next driver ends the job."""
    story = kept(survivor())
    away = Away(story)
    away.lose_host("a")
    away.new_driver()
    story.quiet(20.0)
    assert story.last(cmd.EndJob).outcome == "failed"
    assert not story.commands(cmd.LoadKeptState)


def test_a_draining_host_without_an_agent_starts_nothing():
    """A draining host loses its agent and the kept state: no worker starts there."""
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
    """A spare that held an older state does not count as a holder, so its commit never comes back."""
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
    """The reader of the kept state joins although it failed to join before: no world can form without it."""
    story = kept(survivor("a", "b", "c", spares=1))
    story.answer(lambda e: not (isinstance(e, ev.WorkerReady) and e.holds_state))
    heir = story.cluster.kept_state.reader
    workers = story.cluster.workers
    story.cluster = msgspec.structs.replace(
        story.cluster, workers=workers | {heir: msgspec.structs.replace(workers[heir], failures=1)}
    )
    assert_trains_with_kept_state(story)
    assert str(heir) in story.names


def test_a_survivor_without_the_state_reads_it():
    """The reader is lost while it sends; the receiver, the only other worker of the host, loads the kept state."""
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
    assert_trains_with_kept_state(story)


def test_a_newer_state_is_kept_in_the_place_of_an_older_one():
    """A world trained on and hung again before the driver knew: the newer state replaces the kept one."""
    story = kept(survivor())
    story.answer(lambda e: not isinstance(e, ev.WorkerFormed))
    heir = story.cluster.kept_state.reader
    other = next(w for w in story.cluster.members if w != heir)
    for w in (heir, other):
        story.fakes[w].commit = 107
    story.answers = [e for e in story.answers if not isinstance(e, ev.WorkerFormed)]
    story.note_sent(ev.WorkerFormed(heir, story.cluster.generation))
    story.stick(str(heir)).kill(str(other))
    story.quiet(5.0)
    assert trains(story)
    assert nothing_lost(story, 107)


def test_a_job_that_ends_lets_the_host_go_that_has_kept_its_state():
    """A draining host that stayed only for the kept state is removed when the job ends."""
    story = Story("a", "b", "c", min=2, max=2, elastic_timeout=None).run().commit(7)
    kept(story.stick(A).remove("a").kill(B))
    assert "a" in story.cluster.hosts
    story.stop_job()
    story.quiet(5.0)
    assert "a" not in story.cluster.hosts
    assert story.kept == {}


def test_a_state_that_cannot_be_read_ends_the_job():
    """A kept state that cannot be read ends the job with the error."""
    story = kept(survivor(elastic_timeout=None))
    story.answer(lambda e: not (isinstance(e, ev.WorkerReady) and e.holds_state))
    heir = story.cluster.kept_state.reader
    story.ended(str(heir), error="StateError: it is damaged")
    end = story.last(cmd.EndJob)
    assert (end.outcome, end.culprit) == ("failed", heir)
    assert end.reason == f"{heir} could not read the training state that {A} has kept: StateError: it is damaged"


def test_a_second_kept_copy_is_deleted():
    """A second kept copy of the same commit is deleted."""
    story = kept(survivor())
    story.send(ev.StateKept(wid("b/0#2"), "job", 7))
    assert story.commands(cmd.DeleteKeptState) == [cmd.DeleteKeptState(wid("b/0#2"))]
    assert story.cluster.kept_state.by == wid(A)


def test_only_a_worker_on_its_host_can_read_it():
    """The successor there does not start. Another host's worker runs code before the loop, which no time limit may wait for."""
    story = kept(survivor("a", "b", "c", min=1, spares=1))
    story.hear(ev.WorkerRegistered, "b/0#2")
    assert story.cluster.reason.kind == "kept"
    story.wait(101.0)
    assert story.last(cmd.EndJob).outcome == "failed"
