"""Workers die, freeze and lose one another, at every point of a generation's life."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core import host_lifecycle
from nbelastic.core.state import Stage
from nbelastic.core.step import deadline
from nbelastic.protocol import events as ev
from nbelastic.protocol.exit_codes import HUNG
from tests.core.story import Story, wid, with_stage

LIVE = [Stage.FORMING, Stage.RUNNING, Stage.PREPARING, Stage.ASKED, Stage.LEAVING]


@pytest.mark.parametrize("stage", LIVE)
@pytest.mark.parametrize("victim", ["a/0#1", "b/0#1", "c/0#1"])
def test_a_death_at_any_point_is_survived(stage, victim):
    """Rank 0 or another dies while forming, running, agreeing or leaving: the others are aborted and train on."""
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
    """Two die at once: one reset, and the survivor waits, with its state, for the replacements."""
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
    """The whole host goes: its workers are gone without a strike, and it is tried again."""
    story = with_stage(stage)
    story.lose_host("b").quiet(5.0)
    assert story.cluster.stage is Stage.RUNNING
    assert story.cluster.resets == 1
    assert "b/0#2" in story.names
    assert story.cluster.hosts["b"].slots[0].failures == 0


@pytest.mark.parametrize("stage", LIVE)
def test_a_host_removed_at_once_is_a_break_without_a_failure(stage):
    """`--now` in any stage: its workers are killed and out at once, nobody waits for their exit; no strike."""
    story = with_stage(stage)
    mark = story.mark()
    story.remove("b", now=True)
    assert story.commands(cmd.StopWorker, mark) == [cmd.StopWorker(wid("b/0#1"), kill=True)]
    assert wid("b/0#1") not in story.cluster.member_set
    story.quiet(5.0)
    assert story.cluster.stage is Stage.RUNNING
    assert "b" not in story.cluster.hosts
    assert not story.records("slot-backoff") + story.records("worker-lost")


@pytest.mark.parametrize("stage", LIVE)
def test_a_job_can_be_stopped_at_any_point(stage):
    """Stopped in any stage: every program is told to stop, the job ends once, and the next one runs."""
    story = with_stage(stage)
    story.send(ev.JobStopRequested("job"))
    assert story.last(cmd.EndJob).outcome == "stopped"
    assert story.cluster.members == ()
    story.quiet(6.0)
    assert story.commands(cmd.EndJob) == [story.last(cmd.EndJob)]
    assert not story.records("worker-killed")
    story.run("second").finish()
    assert story.job.outcome == "succeeded"


@pytest.mark.parametrize("stage", LIVE)
def test_a_cluster_can_be_stopped_at_any_point(stage):
    """Stopped in any stage, twice: the job ends, the agents are told once, nothing is started, nothing is left."""
    story = with_stage(stage)
    mark, began = story.mark(), story.now
    hosts = sorted(story.cluster.hosts)
    story.send(ev.StopRequested("done"), ev.StopRequested("again"))
    assert story.reason.startswith("stopping: done; programs may write a last checkpoint: a/0#1")
    assert story.commands(cmd.StopAgent, mark) == []
    story.answer()
    assert sorted(c.host for c in story.commands(cmd.StopAgent, mark)) == hosts
    assert story.commands(cmd.StartWorker, mark) + story.commands(cmd.StartAgent, mark) == []
    assert (story.cluster.phase, story.cluster.workers, story.now) == ("finished", {}, began)


def test_a_stop_without_a_program_tells_the_agents_at_once():
    """Nothing can write a checkpoint: nobody is waited for."""
    story = Story("a:1", "b:1").answer()
    story.send(ev.StopRequested("done"))
    assert [c.host for c in story.commands(cmd.StopAgent)] == ["a", "b"]
    assert story.reason == "stopping: done"


def test_a_stop_lets_a_program_write_its_last_checkpoint():
    """Agents of programs that have ended are told at once; the others when theirs have, or after a minute."""
    story = Story("a:1", "b:1", "c:1", min=1).run().commit(3)
    story.send(ev.StopRequested("done"))
    story.hear(ev.ProgramEnded, "b/0#1")
    assert [c.host for c in story.commands(cmd.StopAgent)] == ["b"]
    story.hang("c/0#1")._unsay(wid("c/0#1"), ev.ProgramEnded)
    story.wait(50.0).hear(ev.ProgramEnded, "a/0#1")
    assert [c.host for c in story.commands(cmd.StopAgent)] == ["b", "a"]
    story.wait(10.0)
    assert story.last(cmd.StopAgent).host == "c"
    story.answer()
    assert story.cluster.phase == "finished"


def test_a_worker_that_still_starts_does_not_cut_the_last_checkpoint_short():
    """The cluster stops: its agent is told at once, and those of programs that run are not."""
    story = Story("a:1", min=1).run().commit(3)
    story.add("b:1").hear(ev.AgentReady)
    story.send(ev.StopRequested("done"))
    assert [c.host for c in story.commands(cmd.StopAgent)] == ["b"]


def test_a_stop_can_be_hastened():
    """Whoever has no time says so, at once or later: the programs are killed then."""
    story = Story("a:1", min=1).run().commit(3)
    story.silent.add(wid("a/0#1"))
    story.send(ev.StopRequested("done"))
    story.wait(4.0).send(ev.StopRequested("now", within=1.0))
    assert deadline(story.cluster, story.now) == story.now + 1.0
    story.wait(1.0)
    assert story.last(cmd.StopAgent).host == "a"
    assert story.cluster.stopping == "done"


def test_an_agent_that_does_not_end_is_not_waited_for():
    """The cluster has ended five seconds after its agents were told, whether or not they say so."""
    story = Story("a:1", "b:1").answer()
    story.send(ev.StopRequested("done"))
    story.answers.clear()
    story.wait(5.0)
    assert (story.cluster.phase, story.cluster.workers) == ("finished", {})
    assert story.records("host-gone") == [f"{name} has left (it did not end in time)" for name in ("a", "b")]


def test_a_stop_does_not_wait_for_hosts_that_are_lost():
    """Nothing will be heard of them: only those that are there are told and waited for; with none the cluster has ended."""
    story = Story("a:1", "b:1").run()
    story.lose_host("b")
    mark = story.mark()
    story.send(ev.StopRequested("done"))
    story.hear(ev.ProgramEnded)
    assert [c.host for c in story.commands(cmd.StopAgent, mark)] == ["a"]
    assert (story.cluster.phase, list(story.cluster.hosts)) == ("stopping", ["a"])
    story.answer()
    assert story.cluster.phase == "finished"
    nowhere = Story("a:1").lose_host("a")
    nowhere.send(ev.StopRequested("done"))
    assert nowhere.cluster.phase == "finished"


def test_a_lost_host_is_not_tried_again_while_the_cluster_stops():
    """Its time comes while a program still writes its last checkpoint: nothing is started, and the driver rests."""
    story = Story("a:1", "b:1", min=1).run()
    story.lose_host("b").hang("a/0#1")
    mark = story.mark()
    story.send(ev.StopRequested("done"))
    story.wait(59.0)
    assert story.commands(cmd.StartAgent, mark) == []


def test_a_death_before_ready_is_replaced():
    """A worker that dies while it starts, or before it has said ready, is replaced; no generation is broken."""
    story = Story("a:2", min=2)
    story.hear(ev.AgentReady).kill("a/0#1").answer()
    story.submit().kill("a/1#1").quiet(2.0)
    assert story.names == ["a/0#2", "a/1#2"]
    assert story.cluster.resets == 0


def test_a_death_during_the_recovery_from_another_is_the_same_break():
    """One dies while the others still gather after a death: one reset, nobody waits for the dead."""
    story = Story("a:4", min=2).run()
    story.kill("a/0#1").hear(ev.WorkerReady, "a/1#1")
    story.kill("a/2#1").hear(ev.WorkerReady)
    assert story.names == ["a/1#1", "a/3#1"]
    assert story.cluster.resets == 1


def test_a_death_while_syncing_leaves_the_state_where_it_was():
    """The newcomer's generation breaks while it forms: those who held the state still do, and the newest of it wins."""
    story = Story("a:2", min=1, cooldown=(0.0, 0.0)).run().commit(7)
    story.add("b:1").answer(lambda e: not isinstance(e, ev.WorkerFormed))
    assert (story.cluster.stage, len(story.cluster.members)) == (Stage.FORMING, 3)
    story.kill("a/0#1").hear(ev.WorkerReady, "a/1#1")
    story.answer()
    order = story.commands(cmd.FormWorld)[2]
    assert order.members[order.root] == wid("a/1#1")
    assert order.members.index(wid("b/0#1")) in order.receivers


def test_the_joiner_dies_and_the_world_never_notices():
    """A newcomer that dies before the switch costs the running world nothing, not even when it was asked already."""
    story = Story("a:2", min=1).run()
    story.add("b:1").hear(ev.AgentReady)
    story.kill("b/0#1").answer(lambda e: not isinstance(e, ev.LeaveAcknowledged))
    assert story.cluster.stage is Stage.ASKED
    story.remove("b", now=True).hear(ev.LeaveAcknowledged)
    assert (story.cluster.stage, story.cluster.generation, story.cluster.resets) == (Stage.RUNNING, 1, 0)
    assert story.last(cmd.CancelLeave).members == story.cluster.members


def test_the_newest_commit_wins_and_everyone_else_receives():
    """Survivors at different commits: the newest is the root; a worker with changes since its commit is not."""
    story = Story("a:4", min=1).run().commit(5)
    story.fakes[wid("a/2#1")].commit += 1
    story.fakes[wid("a/3#1")].commit += 1
    story.fakes[wid("a/3#1")].clean = False
    mark = story.mark()
    story.kill("a/0#1").hear(ev.WorkerReady, "a/1#1", "a/2#1", "a/3#1")
    order = story.commands(cmd.FormWorld, mark)[0]
    assert [str(w) for w in order.members] == ["a/1#1", "a/2#1", "a/3#1"]
    assert (order.root, order.receivers) == (1, (0, 2))


def test_if_nobody_is_clean_everyone_receives():
    """All survivors have changed their tensors since the commit: they differ, so all take the root's."""
    story = Story("a:3", min=1).run().commit(5)
    for fake in story.fakes.values():
        fake.clean = False
    mark = story.mark()
    story.kill("a/0#1").hear(ev.WorkerReady, "a/1#1", "a/2#1")
    order = story.commands(cmd.FormWorld, mark)[0]
    assert (order.root, order.receivers) == (0, (1,))


def test_equal_survivors_send_nothing():
    """All survivors clean at the same commit: nobody receives anything."""
    story = Story("a:3", min=1).run().commit(5)
    mark = story.mark()
    story.kill("a/0#1").hear(ev.WorkerReady, "a/1#1", "a/2#1")
    assert story.commands(cmd.FormWorld, mark)[0].receivers == ()


def test_in_a_planned_change_only_newcomers_receive():
    """All leave at the same commit, so only the newcomer needs the state."""
    story = Story("a:2", min=1).run().commit(5)
    mark = story.mark()
    story.add("b:1").quiet(2.0)
    order = story.commands(cmd.FormWorld, mark)[0]
    assert (order.root, order.receivers) == (0, (2,))


def test_in_the_first_world_everyone_receives_rank_zeros_state():
    """Nobody has trained: rank 0 is the root and all others receive."""
    order = Story("a:3", min=3).run().last(cmd.FormWorld)
    assert (order.root, order.receivers) == (0, (1, 2))


def test_a_stopped_process_never_comes_back_as_a_ghost():
    """SIGSTOP, later SIGCONT: it is killed and replaced, and whatever it says then is said to nobody."""
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
    """Somebody asks for another process in the place of rank 0: it is killed, the others go on, a new one joins."""
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


def test_who_alone_holds_the_state_is_not_restarted():
    """The only member of a world: killing it would lose the training. The order is refused, and nothing happens."""
    story = Story("a:1", min=1).run()
    before, mark = story.cluster, story.mark()
    story.send(ev.RestartRequested(wid("a/0#1"), "dashboard"))
    assert story.cluster == before
    (refused,) = story.commands(cmd.Record, mark)
    assert (refused.kind, "alone holds the training state" in refused.text) == ("order-refused", True)


def test_a_worker_that_freezes_while_it_ends_is_no_strike():
    """One that was told to end and stops instead is killed, and its slot is not punished."""
    story = Story("a:1", "b:1", min=1, max=2)
    story.answer()
    story.scale(1, 1).send(ev.WorkerFrozen(wid("b/0#1"), "stopped"))
    assert story.cluster.hosts["b"].slots[0].failures == 0
    assert wid("b/0#1") not in story.cluster.workers


def test_all_workers_fail_and_the_job_fails_once():
    """Every worker of a job that has trained dies: it fails once, and says that nobody holds the state any more."""
    story = Story("a:3", min=1).run()
    story.kill("a/0#1", "a/1#1", "a/2#1").quiet(10.0)
    ends = story.commands(cmd.EndJob)
    assert [end.outcome for end in ends] == ["failed"]
    assert "no worker is left that holds the training state" in ends[0].reason
    assert "a/2#1 died (SIGKILL)" in ends[0].reason


def test_every_host_is_lost():
    """Every host goes: the job fails once; the hosts are tried again for the next job."""
    story = Story("a:1", "b:1", min=1).run()
    story.lose_host("a").lose_host("b")
    assert [end.outcome for end in story.commands(cmd.EndJob)] == ["failed"]
    story.quiet(10.0).run("second")
    assert story.names == ["a/0#2", "b/0#2"]


def test_all_die_before_anything_was_trained():
    """Before the first world has run there is nothing to lose: the job waits for the replacements and begins."""
    story = Story("a:2", min=2, cooldown=(0.0, 0.0)).submit()
    story.hear(ev.AgentReady).answer(lambda e: not isinstance(e, ev.WorkerFormed))
    story.kill("a/0#1", "a/1#1").quiet(3.0)
    assert story.names == ["a/0#2", "a/1#2"]


def test_a_lost_connection_waits_for_the_news_of_the_death():
    """A collective fails before the death is known: nobody is blamed, and the death's break is the only one."""
    story = Story("a:3", min=2).run()
    story.raised("a/1#1", "RuntimeError: Connection closed", intact=False)
    assert story.cluster.active
    assert story.cluster.stage is Stage.RUNNING
    story.wait(0.05).kill("a/0#1").hear(ev.WorkerReady)
    assert story.names == ["a/1#1", "a/2#1"]
    story.quiet(5.0)
    assert story.cluster.resets == 1


def test_lost_connections_without_a_death_break_the_world():
    """Nobody died, but a rank's connections broke (a partition): after the grace time the world is formed anew."""
    story = Story("a:3", min=2).run()
    story.raised("a/1#1", "RuntimeError: Connection closed", intact=False).quiet(2.0)
    assert (story.cluster.generation, story.cluster.stage, len(story.names)) == (2, Stage.RUNNING, 3)
    assert story.records("world-broken") == ["connections of a/1#1 broke though every worker lives"]


def test_connections_that_break_again_and_again_are_the_programs_fault():
    """Three times in a row at one commit and nobody has died: the job ends with that rank's own error."""
    story = Story("a:3", min=2).run()
    for _ in range(2):
        story.raised("a/1#1", "RuntimeError: sizes differ", intact=False).quiet(2.0)
        assert story.cluster.stage is Stage.RUNNING
    story.raised("a/1#1", "RuntimeError: sizes differ", intact=False).quiet(2.0)
    assert story.job.outcome == "failed"
    assert "rank 1 (a/1#1) raised RuntimeError: sizes differ (3 times in a row" in story.job.reason
    assert story.last(cmd.EndJob).culprit == wid("a/1#1")


def test_progress_clears_unexplained_breaks():
    """Breaks without a death between which the training goes on never add up."""
    story = Story("a:3", min=2).run()
    for _ in range(5):
        story.commit().raised("a/1#1", "RuntimeError: Connection closed", intact=False).quiet(2.0)
    assert not story.job.outcome
    assert story.cluster.resets == 5


def test_unexplained_breaks_of_one_job_do_not_count_in_the_next():
    """A job breaks twice without a death and is stopped: the first such break of the next job does not end that job."""
    story = Story("a:3", min=2).run()
    for _ in range(2):
        story.raised("a/1#1", "RuntimeError: Connection closed", intact=False).quiet(2.0)
    story.send(ev.JobStopRequested("job", "a test"))
    story.quiet(6.0)
    story.submit("other").quiet(2.0)
    story.raised("a/1#1", "RuntimeError: Connection closed", intact=False).quiet(2.0)
    assert not story.job.outcome
    assert story.cluster.stage is Stage.RUNNING


@pytest.mark.parametrize("lost", ["worker", "host"])
def test_a_death_between_unexplained_breaks_begins_their_count_anew(lost):
    """Two breaks without a death, a member dies, another break: the job goes on, as the breaks are not in a row."""
    story = Story("a:3", "b:1", min=2).run()
    others = ("a/0#1", "a/1#1", "a/2#1")
    for _ in range(2):
        story.raised("a/1#1", "RuntimeError: Connection closed", intact=False).quiet(2.0)
    if lost == "host":
        story.send(ev.AgentLost("b", "a test"))
    else:
        story.kill("b/0#1")
    story.hear(ev.WorkerReady, *others).hear(ev.WorkerFormed, *others)  # no commit, and no other worker joins
    assert story.cluster.stage is Stage.RUNNING
    story.raised("a/1#1", "RuntimeError: Connection closed", intact=False).wait(2.0)
    assert not story.job.outcome


def test_a_worker_that_an_abort_did_not_wake_is_no_explanation():
    """A rank ends itself because the abort of an unexplained break could not wake it: the breaks still count as in a row."""
    story = Story("a:3", min=2).run()
    others = ("a/0#1", "a/1#1")
    for _ in range(2):
        story.raised("a/1#1", "RuntimeError: sizes differ", intact=False).quiet(2.0)
    story.kill("a/2#1", code=HUNG).hear(ev.WorkerReady, *others).hear(ev.WorkerFormed, *others)
    assert story.cluster.stage is Stage.RUNNING
    story.raised("a/1#1", "RuntimeError: sizes differ", intact=False).wait(2.0)
    assert story.job.outcome == "failed"


def test_a_connection_lost_while_others_still_form_is_not_forgotten():
    """One raises right after it has formed, before the others have: their forming does not wash that away."""
    story = Story("a:2", min=2)
    story.answer()
    story.submit().hear(ev.WorkerReady).hear(ev.WorkerFormed, "a/0#1")
    story.raised("a/0#1", "RuntimeError", intact=False).hear(ev.WorkerFormed)
    assert story.cluster.stage is Stage.RUNNING
    story.quiet(2.0)
    assert (story.cluster.generation, story.cluster.stage) == (2, Stage.RUNNING)


def test_a_member_that_leaves_unasked_is_noticed():
    """A member says that it waits for a world though its own runs: nobody is left alone in a collective for ever."""
    story = Story("a:2", min=2).run()
    story._abort(wid("a/1#1"), story.cluster.generation)
    story.hear(ev.WorkerReady).quiet(2.0)
    assert (story.cluster.generation, story.cluster.stage) == (2, Stage.RUNNING)


def test_a_worker_that_missed_the_order_gets_it_again():
    """A member still says that it is ready while its world forms: the same order goes to it alone."""
    story = Story("a:2", min=2)
    story.answer()
    story.submit().hear(ev.WorkerReady)
    order = story.last(cmd.FormWorld)
    story.send(ev.WorkerReady(wid("a/1#1"), "job", 0, 0, clean=True, store="x"))
    again = story.last(cmd.FormWorld)
    assert (again.to, again.generation, again.root, again.store) == ((wid("a/1#1"),), 1, order.root, order.store)


def test_the_errors_of_a_break_are_answered_once():
    """All survivors raise within moments, each is aborted once; one that says so again later missed the abort."""
    story = Story("a:3", min=2)
    story.answer()
    story.submit().hear(ev.WorkerReady).hear(ev.WorkerFormed)
    mark = story.mark()
    story.kill("a/0#1")
    for worker in ("a/1#1", "a/2#1"):
        story.send(ev.WorkerRaised(wid(worker), 1, False, "Connection closed by peer"))
    (abort,) = story.commands(cmd.AbortWorld, mark)
    assert abort.members == (wid("a/1#1"), wid("a/2#1"))
    mark = story.mark()
    story.wait(2.0).send(ev.WorkerRaised(wid("a/2#1"), 1, False, "Connection closed by peer"))
    assert [command.members for command in story.commands(cmd.AbortWorld, mark)] == [(wid("a/2#1"),)]


def test_a_worker_that_never_heard_of_the_generation_that_broke_is_told():
    """It repeats its old word while the others gather: it is told of the abort, so that it can say the right one."""
    story = Story("a:3", min=2)
    story.answer()
    story.submit().hear(ev.WorkerReady).kill("a/0#1")
    mark = story.mark()
    story.send(ev.WorkerReady(wid("a/1#1"), "job", 0, 0, clean=True, store="x"))
    assert [(c.generation, c.members) for c in story.commands(cmd.AbortWorld, mark)] == [(1, (wid("a/1#1"),))]
    assert wid("a/1#1") in story.cluster.awaiting


def test_below_min_and_back():
    """Survivors park with their state, for as long as elastic_timeout allows, and go on where they stopped."""
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
    """reset_limit=2: two breaks are recovered from, the third ends the job with exactly that reason."""
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
    """The next job has its own count."""
    story = Story("a:2", min=1, reset_limit=1).run()
    story.kill("a/0#1").quiet(2.0).finish().run("second")
    assert story.cluster.resets == 0


def test_a_worker_that_could_not_leave_is_replaced_without_a_failure():
    """It ended itself, stuck in an aborted collective: that is nobody's fault, and the others go on."""
    story = Story("a:3", min=2).run()
    story.kill("a/0#1").kill("a/1#1", code=HUNG).quiet(2.0)
    assert len(story.names) == 3
    slots = story.cluster.hosts["a"].slots
    assert [(slot.failures, slot.restarts) for slot in slots] == [(1, 1), (0, 1), (0, 0)]


def test_a_program_that_exits_like_a_stuck_worker_is_not_forked_in_a_hot_loop():
    """It ends with that code at once, each time: its slot gets strikes, and pauses that double."""
    story = Story("a:3", min=2, cooldown=(5.0, 300.0)).run()
    began = story.now
    for _ in range(6):
        while not (newest := [w for w in story.alive("a") if wid(w).slot == 1]):
            story.wait(1.0).answer()
        story.kill(*newest, code=HUNG).quiet(0.1)
    assert story.now - began > 5 + 10 + 20


def test_names_of_hosts_that_left_are_not_kept_for_ever(monkeypatch):
    """Autoscaled hosts come and go under ever new names: few are remembered, and no worker's name is used twice."""
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


def sending(story):
    """A member that is one commit ahead sends its state to the others."""
    story.fakes[wid("a/0#1")].commit += 1
    story.kill("a/3#1").hear(ev.WorkerReady)
    assert story.cluster.stage is Stage.FORMING
    assert story.cluster.formation.root == 0
    return story


def test_a_receiver_whose_sender_dies_never_sends_on_a_mixture():
    """It holds parts of two commits: it says that it holds no state, and receives it from a member that holds one."""
    story = sending(Story("a:4", min=1).run().commit(5))
    mark = story.mark()
    story.kill("a/0#1").tear("a/1#1").hear(ev.WorkerReady, "a/1#1", "a/2#1")
    order = story.commands(cmd.FormWorld, mark)[0]
    assert [str(w) for w in order.members] == ["a/1#1", "a/2#1"]
    assert (order.root, order.receivers) == (1, (0,))
    story.quiet(3.0)
    assert story.cluster.stage is Stage.RUNNING


def test_a_job_whose_survivors_all_hold_mixtures_fails_in_words():
    """Nobody holds the state any more: the job ends, and does not go on from parts of two commits."""
    story = sending(Story("a:4", min=1).run().commit(5))
    mark = story.mark()
    story.kill("a/0#1").tear("a/1#1", "a/2#1").hear(ev.WorkerReady, "a/1#1", "a/2#1")
    assert story.commands(cmd.FormWorld, mark) == []
    end = story.last(cmd.EndJob)
    assert end.outcome == "failed"
    assert "broke off halfway; no worker is left that holds the training state" in end.reason
