"""A driver ends and a new one takes over: an idle cluster, a starting job, a whole world, a reconfiguration."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import HostPhase, Stage, WorkerState
from nbelastic.protocol import events as ev
from nbelastic.protocol.program_events import SwapSubmitted
from tests.core.away import Away, disturbed, three, trains
from tests.core.story import Story, wid, with_stage

# ---- idle and starting clusters ----


def test_an_idle_cluster_is_as_it_was():
    """Without a job no worker is started or stopped, and the next job runs on the same workers."""
    story = Story("a:2", "b:1", min=2).answer()
    mark = story.mark()
    Away(story).new_driver()
    assert disturbed(story, mark) == []
    assert {worker.state for worker in story.cluster.workers.values()} == {WorkerState.READY}
    assert trains(story.run(), "a/0#1", "a/1#1", "b/0#1")


def test_workers_that_were_starting_start():
    """Workers that have not registered, or not run the setup cells, start as usual."""
    story = Story("a:2", "b:1", min=2)
    story.hear(ev.AgentReady).hear(ev.WorkerRegistered, "a/0#1")
    Away(story).new_driver()
    assert story.cluster.starting == {wid("a/1#1"), wid("b/0#1")}
    assert trains(story.run(), "a/0#1", "a/1#1", "b/0#1")


def test_a_host_whose_agent_was_starting_is_admitted():
    """An agent that was starting is admitted by the new driver, or refused if it cannot be used."""
    story = Story("a:1", min=1).answer()
    story.add("b:1")
    Away(story).new_driver().answer()
    assert story.cluster.hosts["b"].phase is HostPhase.UP
    assert story.alive() == ["a/0#1", "b/0#1"]


def test_an_agent_that_does_not_report_in_time_is_replaced():
    """A host whose agent does not report in time gets another agent at once."""
    story = Story("a:1", "b:1", min=1).answer()
    mark = story.mark()
    Away(story).new_driver(late=["b"]).answer()
    assert [command.host.name for command in story.commands(cmd.StartAgent, mark)] == ["b"]
    assert story.cluster.hosts["b"].phase is HostPhase.UP


def test_a_host_whose_batch_job_is_queued_stays_starting():
    """A host whose batch job is queued stays starting, is not submitted again, and is admitted when it reports."""
    story = Story("a:1", min=1).answer()
    story.add("b:1")
    mark = story.mark()
    Away(story).new_driver(coming=["b"])
    assert story.cluster.hosts["b"].phase is HostPhase.STARTING
    story.answer()
    assert story.commands(cmd.StartAgent, mark) == []
    assert story.alive() == ["a/0#1", "b/0#1"]


def test_a_host_whose_batch_job_runs_without_a_report_is_lost():
    """A host whose batch job runs without a report is lost and tried again."""
    story = Story("a:1", "b:1", min=1).answer()
    mark = story.mark()
    story.end_agent("b")
    Away(story).new_driver(coming=["b"]).answer()
    assert [command.host.name for command in story.commands(cmd.StartAgent, mark)] == ["b"]


def test_failures_are_not_forgotten():
    """A slot keeps its back-off, its failures and its restarts under the new driver."""
    story = Story("a:2", min=1, cooldown=(8.0, 64.0)).run().kill("a/1#1").answer().kill("a/1#2").answer()
    until = story.cluster.hosts["a"].slots[1].backoff_until
    assert until == story.now + 8.0
    Away(story).new_driver().answer().wait(7.0)
    assert story.alive() == ["a/0#1"]
    story.wait(1.0)
    assert story.now == until
    assert story.alive() == ["a/0#1", "a/1#3"]
    story.kill("a/1#3").answer()
    slot = story.cluster.hosts["a"].slots[1]
    assert (slot.backoff_until, slot.restarts) == (story.now + 16.0, 3)


def test_a_host_that_was_lost_before_waits_for_its_time():
    """A new driver does not end a host's back-off early."""
    story = Story("a:1", "b:1", min=1, cooldown=(8.0, 64.0)).answer().lose_host("b").answer()
    mark = story.mark()
    Away(story).new_driver().answer().wait(7.0)
    assert story.commands(cmd.StartAgent, mark) == []
    story.wait(1.0)
    assert [command.host.name for command in story.commands(cmd.StartAgent, mark)] == ["b"]


@pytest.mark.parametrize("reached", [0, 1, 3])
def test_each_worker_gets_the_program_of_the_job_once(reached):
    """The driver ends as it starts programs: each worker gets exactly one program."""
    story = Story("a:2", "b:1", min=3).answer()
    away = Away(story, ev.JobSubmitted("job"), reached=1 + reached)
    mark = story.mark()
    away.new_driver()
    assert len(story.commands(cmd.RunProgram, mark)) == 3 - reached
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1")
    assert story.cluster.resets == 0


def test_a_job_that_was_never_saved_is_over():
    """Programs of a job that was not saved are asked to stop, and the cluster is idle."""
    story = Story("a:2", min=1).answer()
    Away(story, ev.JobSubmitted("job"), written=False).new_driver().quiet(6.0)
    assert story.cluster.job is None
    assert not any(fake.job for fake in story.fakes.values())
    assert trains(story.run("next"))


def test_programs_that_are_not_in_the_loop_yet_are_waited_for():
    """The new driver waits for a program that has not reached the loop, and restarts no program."""
    story = Story("a:2", "b:1", min=3).answer()
    story.submit().hear(ev.WorkerReady, "a/0#1")
    away = Away(story)
    story.fakes[wid("b/0#1")].word = None  # imports, say
    mark = story.mark()
    away.new_driver()
    assert story.cluster.newcomers == {wid("a/0#1"), wid("a/1#1")}
    assert story.cluster.starting == {wid("b/0#1")}
    assert disturbed(story, mark) == []
    story._say_ready(wid("b/0#1"))
    assert trains(story.quiet(2.0))
    assert story.cluster.resets == 0


def test_a_first_world_that_was_forming_is_formed_again():
    """A first world that was forming forms again with a new number, without a reset."""
    story = with_stage(Stage.FORMING)
    mark = story.mark()
    Away(story).new_driver()
    assert story.commands(cmd.AbortWorld, mark)[0].generation == 1
    assert trains(story.quiet(2.0), "a/0#1", "b/0#1", "c/0#1")
    assert (story.cluster.resets, story.cluster.generation) == (0, 2)


def test_a_first_world_that_has_formed_meanwhile_goes_on():
    """A first world that formed without a driver trains on undisturbed."""
    story = with_stage(Stage.FORMING)
    mark = story.mark()
    Away(story).form().commit(4).new_driver()
    assert disturbed(story, mark) == []
    assert trains(story, "a/0#1", "b/0#1", "c/0#1")
    assert story.job.formed


def test_a_formation_that_reached_only_some_is_cancelled():
    """A formation reached only some workers: they are aborted, and all form the next generation."""
    story = Story("a:2", "b:1", min=3).answer()
    story.submit().hear(ev.WorkerReady, "a/0#1", "a/1#1")
    last = next(e for e in story.answers if isinstance(e, ev.WorkerReady))
    Away(story, last, reached=1, written=False).new_driver()
    assert trains(story.quiet(2.0), "a/0#1", "a/1#1", "b/0#1")
    assert story.cluster.generation == 2


# ---- a world that is whole ----


def test_a_world_that_is_whole_goes_on_undisturbed():
    """Generation, members and ranks stay; no worker is aborted, stopped or started, and no step is lost."""
    story = three()
    before, mark = story.cluster, story.mark()
    Away(story).commit(100).new_driver()
    cluster = story.cluster
    assert disturbed(story, mark) == []
    assert (cluster.generation, cluster.members, cluster.resets) == (before.generation, before.members, 0)
    assert {story.fakes[w].commit for w in cluster.members} == {105}
    assert story.records("world-found") == ["3 workers train on in generation 1"]
    story.quiet(60.0)
    assert disturbed(story, mark) == []


def test_the_new_driver_keeps_the_ranks_that_workers_report():
    """The new driver keeps the ranks that workers report, although hosts have another order."""
    story = three()
    story.kill("a/0#1").quiet(3.0)
    names = story.names
    Away(story).new_driver()
    assert trains(story, *names)


def test_survivors_keep_their_order():
    """A member was lost meanwhile: survivors keep their order, whichever reports first."""
    story = Story("a:1", "b:1", "c:1", "d:1", min=1).run().quiet(60.0)
    story.kill("b/0#1").quiet(3.0)
    assert story.names == ["a/0#1", "c/0#1", "d/0#1", "b/0#2"]
    Away(story).kill("c/0#1").new_driver()
    story.quiet(3.0)
    assert story.names == ["a/0#1", "d/0#1", "b/0#2", "c/0#2"]


def test_reconfigurations_work_under_a_new_driver():
    """A host is added and one removed under the new driver: the members change without an abort."""
    story = three()
    Away(story).commit(3).new_driver()
    mark = story.mark()
    assert trains(story.add("c:1").quiet(3.0), "a/0#1", "a/1#1", "b/0#1", "c/0#1")
    story.commit(3).answer().remove("a").quiet(3.0)
    assert trains(story, "b/0#1", "c/0#1")
    assert story.commands(cmd.AbortWorld, mark) == []
    assert len(story.commands(cmd.PrepareWorld, mark)) == 2
    assert story.cluster.resets == 0


def test_a_loss_under_a_new_driver_is_survived():
    """Rank 0 is lost under the new driver: the newest commit is kept, and a new incarnation joins."""
    story = three()
    Away(story).commit(3).new_driver()
    assert trains(story.kill("a/0#1").quiet(3.0), "a/1#1", "a/0#2", "b/0#1")
    assert story.fakes[wid("a/0#2")].commit >= 8


def test_two_new_drivers_one_after_the_other():
    """The second driver ends as well: the third finds the same world."""
    story = three()
    Away(story).commit().new_driver()
    mark = story.mark()
    Away(story).commit().new_driver()
    assert disturbed(story, mark) == []
    assert trains(story, "a/0#1", "a/1#1", "b/0#1")


def test_newcomers_that_wait_join_without_an_abort():
    """Two newcomers wait when the driver ends: they join without an abort."""
    story = three()
    story.add("c:2").answer(lambda e: not isinstance(e, ev.WorkerReady))
    mark = story.mark()
    Away(story).new_driver()
    assert story.cluster.newcomers == {wid("c/0#1"), wid("c/1#1")}
    story.quiet(3.0)
    assert trains(story)
    assert len(story.names) == 5
    assert story.commands(cmd.AbortWorld, mark) == []


# ---- a reconfiguration is under way ----


@pytest.mark.parametrize("stage", [Stage.PREPARING, Stage.ASKED])
def test_a_prepared_reconfiguration_is_cancelled_and_made_again(stage):
    """No member has left: the prepared group is dropped, and the reconfiguration is made again."""
    story = with_stage(stage)
    mark = story.mark()
    Away(story).new_driver()
    assert (story.cluster.generation, story.cluster.resets) == (1, 0)
    assert story.commands(cmd.DropWorld, mark)[0].generation == 2
    assert [c.members for c in story.commands(cmd.CancelLeave, mark)] == (
        [story.cluster.members] if stage is Stage.ASKED else []
    )
    assert all(set(c.members) == {wid("d/0#1")} for c in story.commands(cmd.AbortWorld, mark))
    assert trains(story.quiet(3.0), "a/0#1", "b/0#1", "c/0#1", "d/0#1")
    assert story.cluster.generation > 2
    assert story.cluster.resets == 0


def test_members_bound_to_a_leave_point_are_released():
    """Only some members were asked for a leave point: all are asked to stay, and none waits without end."""
    story = with_stage(Stage.PREPARING)
    last = next(e for e in story.answers if isinstance(e, ev.WorkerPrepared))
    story.answer(lambda e: isinstance(e, ev.WorkerPrepared) and e is not last and e.worker != last.worker)
    mark = story.mark()
    Away(story, last, reached=3, written=False).new_driver()
    assert [fake.bound for fake in story.fakes.values()] == [False] * 4
    assert story.commands(cmd.CancelLeave, mark)[0].members == story.cluster.members
    assert trains(story.quiet(3.0))


def test_no_member_has_left_yet():
    """A leave point was agreed and no member has reached it: they stay, and change later."""
    story = with_stage(Stage.LEAVING)
    mark = story.mark()
    members = story.cluster.members
    Away(story, held=members).new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "b/0#1", "c/0#1", "d/0#1")
    assert not {w for c in story.commands(cmd.AbortWorld, mark) for w in c.members} & set(members)
    assert story.cluster.resets == 0


@pytest.mark.parametrize("held", [["a/0#1"], ["b/0#1", "c/0#1"]])
def test_some_have_left_and_some_not(held):
    """Some members have left: all are aborted and train on together. Nothing has failed, so no reset is counted."""
    story = with_stage(Stage.LEAVING, reset_limit=0)
    Away(story, held=[wid(w) for w in held]).new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "b/0#1", "c/0#1", "d/0#1")
    assert story.cluster.resets == 0


@pytest.mark.parametrize("victim", ["b/0#1", "d/0#1"], ids=["a member", "a newcomer in the next world"])
@pytest.mark.parametrize("noticed", [True, False])
def test_some_have_left_and_one_is_lost(victim, noticed):
    """A worker of the last world or of the next one died meanwhile: that is a reset."""
    story = with_stage(Stage.LEAVING)
    Away(story, held=[wid("a/0#1")]).kill(victim, noticed=noticed).new_driver()
    assert trains(story.quiet(10.0))
    assert story.cluster.resets == 1


@pytest.mark.parametrize("reached", range(1, 4))
def test_a_new_program_that_had_reached_only_some(reached):
    """The driver died as it ordered the change to a new program: all return to the old one, and no reset is counted."""
    story = three(reset_limit=0)
    story.send(SwapSubmitted(1, "you"))
    story.answer(lambda e: not isinstance(e, ev.WorkerHalted))
    *first, last = [e for e in story.answers if isinstance(e, ev.WorkerHalted)]
    story.answer(lambda e: e in first)
    Away(story, last, reached=reached, written=False).new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1")
    assert (story.cluster.resets, story.job.program) == (0, 0)


def test_all_have_changed_over_meanwhile():
    """All members have left and the prepared world runs: it trains on undisturbed."""
    story = with_stage(Stage.LEAVING)
    mark = story.mark()
    Away(story).form().commit(7).new_driver()
    assert disturbed(story, mark) == []
    assert trains(story, "a/0#1", "b/0#1", "c/0#1", "d/0#1")
    assert story.cluster.generation == 2


def test_all_have_left_for_a_plain_change():
    """All members have left without a prepared group: a world forms of all, without a reset."""
    story = three()
    story.add("c:1").answer(lambda e: not isinstance(e, ev.WorkerPrepared))
    story.send(ev.WorkerPrepared(wid("c/0#1"), 2, "no way"))
    story.answer(lambda e: not isinstance(e, ev.WorkerReady))
    assert story.cluster.stage is Stage.LEAVING
    Away(story).new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1", "c/0#1")
    assert story.cluster.resets == 0


def test_a_leaver_that_was_not_stopped_yet_is_stopped():
    """A leaver that was not stopped yet is asked again, and its end is not a failure."""
    story = three().remove("b")
    story.answer(lambda e: not isinstance(e, ev.WorkerFormed))
    story.hear(ev.WorkerFormed, "a/0#1")
    last = next(e for e in story.answers if isinstance(e, ev.WorkerFormed))
    Away(story, last, reached=0).form().new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1")
    assert list(story.cluster.hosts) == ["a"]
    assert story.cluster.resets == 0
