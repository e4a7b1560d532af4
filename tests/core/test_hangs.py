"""A worker that an abort does not wake ends; if it alone holds the training state, it keeps that state first."""

from __future__ import annotations

from nbelastic.core import commands as cmd
from nbelastic.core.state import KeptState, Stage
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec
from tests.core.away import Away, trains
from tests.core.fakes import FakeWorker
from tests.core.hung import A, B, C, nothing_lost, survivor
from tests.core.story import Story, wid


def test_the_only_holder_of_the_state_keeps_it_for_its_successor():
    """The hung worker keeps the state and ends; the next worker of its host loads it, and no commit is lost."""
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
    """Of two survivors one hangs: it ends without keeping the state, as the other holds it."""
    story = Story("a", "b", "c", min=2).run().commit(7)
    story.stick(A).kill(B).quiet(5.0)
    assert {answer.keep for answer in story.commands(cmd.EndHungWorker)} == {False}
    assert not story.records("state-kept")
    assert trains(story)
    assert story.fakes[wid(C)].commit == 7


def test_of_two_hung_workers_one_keeps_the_state():
    """Of two hung workers the first keeps the state; the second ends after that."""
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
    """Enough newcomers without the state are ready: no world forms before the successor has loaded it."""
    story = survivor("a", "b", "c", spares=1)
    story.silent.add(wid("a/0#2"))
    mark = story.mark()
    story.quiet(5.0)
    assert story.cluster.kept_state == KeptState(wid(A), 7)
    assert not story.commands(cmd.FormWorld, mark)
    assert "is kept on a, for a worker there" in story.reason


def test_a_successor_is_started_before_all_others():
    """The successor starts first, although slots on older hosts are free."""
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
    """Without a successor the job ends after `elastic_timeout`, and the reason names the host."""
    story = survivor()
    story.hear(ev.WorkerHung).hear(ev.StateKept)
    story.send(ev.HostAdded(HostSpec("c", 2), "a test"))
    story.silent |= {wid(f"a/0#{n}") for n in range(2, 100)}
    story.quiet(2000.0)
    assert story.commands(cmd.EndJob)[0].outcome == "failed"
    assert "kept on a" in story.commands(cmd.EndJob)[0].reason


def test_the_host_that_keeps_the_state_is_lost():
    """The host with the kept state is lost: the job ends at once with that reason."""
    story = survivor()
    story.hear(ev.WorkerHung).hear(ev.StateKept).hear(ev.WorkerExited)
    assert story.cluster.kept_state == KeptState(wid(A), 7)
    story.lose_host("a")
    assert story.last(cmd.EndJob).reason == "the training state was kept on a, which was lost"
    assert story.cluster.kept_state is None


def test_a_successor_that_dies_leaves_the_state_to_the_next():
    """The state stays on disk until a world has formed with it."""
    story = survivor(cooldown=(0.0, 0.0))
    story.answer(lambda e: not isinstance(e, ev.WorkerFormed))
    assert story.cluster.stage is Stage.FORMING, story.reason
    story.kill("a/0#2").quiet(5.0)
    assert trains(story)
    assert nothing_lost(story)


def test_a_new_driver_knows_what_is_kept():
    """The driver ends between the keeping and the successor: no commit is lost."""
    story = survivor()
    story.hear(ev.WorkerHung).hear(ev.StateKept).hear(ev.WorkerExited)
    Away(story).new_driver()
    story.quiet(5.0)
    assert trains(story)
    assert nothing_lost(story)


def test_a_new_driver_is_asked_again():
    """The driver ends before it has answered a hung worker: the worker asks the new driver."""
    story = survivor()
    Away(story).new_driver()
    story.quiet(5.0)
    assert trains(story)
    assert nothing_lost(story)


def test_a_job_that_is_over_keeps_nothing():
    """A job is stopped while a worker hangs: the job ends, and the next one begins with a new state."""
    story = survivor()
    story.hear(ev.WorkerHung)
    story.stop_job()
    story.quiet(5.0)
    assert story.cluster.kept_state is None
    story.run("second").commit(1).finish()


def test_the_state_of_an_earlier_job_is_deleted():
    """A worker has taken so long to keep it that the next job trains, which does not load it."""
    story = Story("a", "b").run("second").commit(3)
    story.send(ev.StateKept(wid(A), "first", 7))
    assert story.cluster.kept_state is None
    assert story.last(cmd.DeleteKeptState) == cmd.DeleteKeptState(wid(A))


def test_a_worker_that_hangs_at_the_end_of_a_job_keeps_nothing():
    """No other job can use its state."""
    story = survivor().stop_job()
    story.send(ev.WorkerHung(wid(A), story.cluster.generation, 7))
    assert story.last(cmd.EndHungWorker) == cmd.EndHungWorker(wid(A))


def test_a_spare_never_loads_the_kept_state():
    """A spare on the same host does not load the kept state, and no older commit comes back."""
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
    """A spare that has left the world no longer holds the newest state.

    The job fails and does not go back to an older commit.
    """
    story = survivor("a", "b", "c", spares=1)
    story.quiet(5.0)
    story.commit(5000)
    story.kill(*story.names)
    assert story.last(cmd.EndJob).outcome == "failed"


def test_a_world_that_formed_without_a_driver_needs_nothing_from_the_disk():
    """The driver ends as the world forms with the kept state; the next driver knows of no kept state."""
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


def test_a_hung_worker_is_answered_after_all_members_have_left():
    """The driver answers a hung worker only after each member has left or was lost, as a silent member may be lost."""
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


def test_a_hung_worker_that_wakes_still_holds_its_state():
    """A hung worker wakes after it was asked to end: it still holds its state when the other survivor is lost."""
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
