"""Workers are lost, freeze or are restarted, at every point of a generation's life."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core import host_lifecycle
from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from nbelastic.protocol.exit_codes import HUNG
from tests.core.story import LIVE, Story, wid, with_stage


@pytest.mark.parametrize("stage", LIVE)
@pytest.mark.parametrize("victim", ["a/0#1", "b/0#1", "c/0#1"])
def test_a_death_at_any_point_is_survived(stage, victim):
    """A member is lost while the world forms, runs, agrees or leaves: the others are aborted and train on."""
    story = with_stage(stage)
    generation, newcomers, mark = story.cluster.highest_generation, len(story.cluster.newcomers), story.mark()
    story.kill(victim)
    abort = story.commands(cmd.AbortWorld, mark)[0]
    assert (abort.generation, wid(victim) in abort.members, len(abort.members)) == (generation, False, 2 + newcomers)
    story.quiet(5.0)
    assert story.cluster.stage is Stage.RUNNING
    assert victim not in story.names
    assert f"{victim[0]}/0#2" in story.names
    assert story.cluster.resets == 1


@pytest.mark.parametrize("stage", LIVE)
def test_two_deaths_at_once_are_one_break(stage):
    """Two members are lost at once: one reset, and the survivor waits with its state for the replacements."""
    story = with_stage(stage)
    story.kill("a/0#1", "c/0#1").quiet(5.0)
    assert story.cluster.resets == 1
    assert story.cluster.stage is Stage.RUNNING
    assert {"a/0#2", "b/0#1", "c/0#2"} <= set(story.names)
    if stage is not Stage.FORMING:
        order = next(o for o in story.commands(cmd.FormWorld) if wid("a/0#2") in o.members)
        assert order.members[order.root] == wid("b/0#1")


@pytest.mark.parametrize("stage", LIVE)
def test_a_host_lost_at_any_point_is_survived(stage):
    """A host is lost: its slots have no failure, and the host is tried again."""
    story = with_stage(stage)
    story.lose_host("b").quiet(5.0)
    assert story.cluster.stage is Stage.RUNNING
    assert story.cluster.resets == 1
    assert "b/0#2" in story.names
    assert story.cluster.hosts["b"].slots[0].failures == 0


@pytest.mark.parametrize("stage", LIVE)
def test_a_host_removed_at_once_is_a_break_without_a_failure(stage):
    """`--now` kills and removes a host's workers at once, in any stage, without waiting for their exit and without a failure."""
    story = with_stage(stage)
    mark = story.mark()
    story.remove("b", now=True)
    assert story.commands(cmd.StopWorker, mark) == [cmd.StopWorker(wid("b/0#1"), kill=True)]
    assert wid("b/0#1") not in story.cluster.member_set
    story.quiet(5.0)
    assert story.cluster.stage is Stage.RUNNING
    assert "b" not in story.cluster.hosts
    assert not story.records("slot-backoff") + story.records("worker-lost")


def test_a_death_before_ready_is_replaced():
    """A worker that is lost before it is ready is replaced, and no generation breaks."""
    story = Story("a:2", min=2)
    story.hear(ev.AgentReady).kill("a/0#1").answer()
    story.submit().kill("a/1#1").quiet(2.0)
    assert story.names == ["a/0#2", "a/1#2"]
    assert story.cluster.resets == 0


def test_a_death_during_the_recovery_from_another_is_the_same_break():
    """A second member is lost during a recovery: one reset, and no wait for the lost member."""
    story = Story("a:4", min=2).run()
    story.kill("a/0#1").hear(ev.WorkerReady, "a/1#1")
    story.kill("a/2#1").hear(ev.WorkerReady)
    assert story.names == ["a/1#1", "a/3#1"]
    assert story.cluster.resets == 1


def test_a_newcomer_is_lost_and_the_world_is_not_disturbed():
    """A newcomer is lost before the members leave: the running world is not disturbed."""
    story = Story("a:2", min=1).run()
    story.add("b:1").hear(ev.AgentReady)
    story.kill("b/0#1").answer(lambda e: not isinstance(e, ev.LeaveAcknowledged))
    assert story.cluster.stage is Stage.ASKED
    story.remove("b", now=True).hear(ev.LeaveAcknowledged)
    assert (story.cluster.stage, story.cluster.generation, story.cluster.resets) == (Stage.RUNNING, 1, 0)
    assert story.last(cmd.CancelLeave).members == story.cluster.members


def test_messages_of_a_replaced_frozen_worker_are_dropped():
    """A frozen worker is killed and replaced; messages after its SIGCONT are dropped."""
    story = Story("a:3", min=2).run()
    story._forget(wid("a/0#1"))
    mark = story.mark()
    story.send(ev.WorkerFrozen(wid("a/0#1"), "stopped"))
    assert story.commands(cmd.StopWorker, mark) == [cmd.StopWorker(wid("a/0#1"), kill=True)]
    story.quiet(3.0)
    assert story.names == ["a/1#1", "a/2#1", "a/0#2"]
    before = story.cluster
    story.send(
        ev.WorkerReady(wid("a/0#1"), "job", 1, 3, clean=True, store="ghost"),
        ev.WorkerFormed(wid("a/0#1"), 1),
        ev.WorkerRaised(wid("a/0#1"), 1, intact=True, error="ghost"),
        ev.ProgramEnded(wid("a/0#1"), "job", "ghost"),
        ev.WorkerExited(wid("a/0#1"), -9),
    )
    assert story.cluster == before


def test_a_worker_is_restarted_at_once_and_without_a_failure():
    """A client restarts rank 0: it is killed, the others go on, and its replacement joins."""
    story = Story("a:3", min=2).run()
    story._forget(wid("a/0#1"))
    mark = story.mark()
    story.send(ev.RestartRequested(wid("a/0#1"), "dashboard"))
    assert story.commands(cmd.StopWorker, mark) == [cmd.StopWorker(wid("a/0#1"), kill=True)]
    assert story.commands(cmd.Record, mark)[0].text == "a/0#1 was restarted by dashboard"
    story.quiet(3.0)
    assert story.names == ["a/1#1", "a/2#1", "a/0#2"]
    slot = story.cluster.hosts["a"].slots[0]
    assert (slot.failures, slot.restarts) == (0, 1)


def test_the_only_holder_of_the_state_is_not_restarted():
    """A restart of the only holder of the training state is refused."""
    story = Story("a:1", min=1).run()
    before, mark = story.cluster, story.mark()
    story.send(ev.RestartRequested(wid("a/0#1"), "dashboard"))
    assert story.cluster == before
    (refused,) = story.commands(cmd.Record, mark)
    assert (refused.kind, "alone holds the training state" in refused.text) == ("order-refused", True)


def test_a_worker_that_freezes_while_it_ends_is_not_a_failure():
    """A worker that freezes after it was asked to end is killed, without a failure of its slot."""
    story = Story("a:1", "b:1", min=1, max=2)
    story.answer()
    story.scale(1, 1).send(ev.WorkerFrozen(wid("b/0#1"), "stopped"))
    assert story.cluster.hosts["b"].slots[0].failures == 0
    assert wid("b/0#1") not in story.cluster.workers


def test_all_workers_fail_and_the_job_fails_once():
    """All workers of a job that has trained are lost: it fails once, as no worker holds the state."""
    story = Story("a:3", min=1).run()
    story.kill("a/0#1", "a/1#1", "a/2#1").quiet(10.0)
    ends = story.commands(cmd.EndJob)
    assert [end.outcome for end in ends] == ["failed"]
    assert "no worker is left that holds the training state" in ends[0].reason
    assert "a/2#1 died (SIGKILL)" in ends[0].reason


def test_every_host_is_lost():
    """All hosts are lost: the job fails once, and the hosts are tried again for the next job."""
    story = Story("a:1", "b:1", min=1).run()
    story.lose_host("a").lose_host("b")
    assert [end.outcome for end in story.commands(cmd.EndJob)] == ["failed"]
    story.quiet(10.0).run("second")
    assert story.names == ["a/0#2", "b/0#2"]


def test_all_die_before_anything_was_trained():
    """All workers are lost before the first world has run: the job waits for replacements and begins."""
    story = Story("a:2", min=2, cooldown=(0.0, 0.0)).submit()
    story.hear(ev.AgentReady).answer(lambda e: not isinstance(e, ev.WorkerFormed))
    story.kill("a/0#1", "a/1#1").quiet(3.0)
    assert story.names == ["a/0#2", "a/1#2"]


def test_below_min_and_back():
    """Survivors below min wait with their state, up to elastic_timeout, and resume where they stopped."""
    story = Story("a:1", "b:1", min=2, elastic_timeout=600.0).run().commit(9)
    story.lose_host("b").answer()
    assert story.cluster.phase == "waiting"
    assert "1 of min 2 workers ready; waiting for b (lost" in story.reason
    story.silent.add(wid("b/0#2"))
    story.quiet(500.0)
    assert story.cluster.active
    story.kill("b/0#2").quiet(60.0)
    order = story.last(cmd.FormWorld)
    assert (order.root, story.fakes[wid("b/0#3")].commit) == (0, 9)
    assert story.cluster.stage is Stage.RUNNING


def test_failures_count_against_the_reset_limit():
    """With reset_limit=2 the third break ends the job with exactly that reason."""
    story = Story("a:2", min=1, reset_limit=2, cooldown=(0.0, 0.0)).run()
    for number in (1, 2):
        story.kill(story.alive()[-1]).quiet(2.0)
        assert (story.cluster.stage, story.cluster.resets) == (Stage.RUNNING, number)
    victim = story.alive()[-1]
    story.kill(victim)
    assert story.last(cmd.EndJob).reason == f"3 resets exceed reset_limit=2; the last: {victim} died (SIGKILL)"


def test_planned_changes_do_not_count():
    """Hosts come and go with reset_limit=0, and the job goes on."""
    story = Story("a:1", min=1, reset_limit=0).run()
    story.add("b:1").quiet(2.0).remove("b").quiet(2.0).scale(1, 1).quiet(2.0)
    assert story.cluster.active
    assert story.cluster.generation == 3


def test_a_new_jobs_resets_begin_at_zero():
    """Each job has its own count of resets."""
    story = Story("a:2", min=1, reset_limit=1).run()
    story.kill("a/0#1").quiet(2.0).finish().run("second")
    assert story.cluster.resets == 0


def test_a_worker_that_could_not_leave_is_replaced_without_a_failure():
    """A worker that ended itself because it hung is replaced without a failure, and the others go on."""
    story = Story("a:3", min=2).run()
    story.kill("a/0#1").kill("a/1#1", code=HUNG).quiet(2.0)
    assert len(story.names) == 3
    slots = story.cluster.hosts["a"].slots
    assert [(slot.failures, slot.restarts) for slot in slots] == [(1, 1), (0, 1), (0, 0)]


def test_a_program_that_exits_like_a_stuck_worker_is_not_forked_in_a_hot_loop():
    """A program that exits with the code of a hung worker, at once and each time, causes back-off."""
    story = Story("a:3", min=2, cooldown=(5.0, 300.0)).run()
    began = story.now
    for _ in range(6):
        while not (newest := [w for w in story.alive("a") if wid(w).slot == 1]):
            story.wait(1.0).answer()
        story.kill(*newest, code=HUNG).quiet(0.1)
    assert story.now - began > 5 + 10 + 20


def test_names_of_hosts_that_left_are_not_kept_without_end(monkeypatch):
    """Autoscaled hosts with ever new names come and go: few names are kept, and no worker id repeats."""
    monkeypatch.setattr(host_lifecycle, "NAMES", 3)
    story = Story("a:1", min=1).run()
    names = ["a", *(f"spot{i}" for i in range(6)), "a", "spot0", "a"]
    for name in names[1:]:
        story.add(f"{name}:1").quiet(3.0)
        for other in [other for other in story.cluster.hosts if other != name]:
            story.remove(other).quiet(3.0)
        story.kill(str(story.alive(name)[0])).quiet(3.0)
        assert len(story.cluster.incarnations) <= 4
    assert len(story.started) == 2 * len(names) - 1
