"""A cluster's driver is killed, things happen or not, and a new driver comes: see `away.Away`."""

from __future__ import annotations

import pytest

from nbelastic.core import messages as m
from nbelastic.core.takeover import missing, summary
from nbelastic.core.world import HostPhase, Stage, WorkerState
from tests.core.away import Away
from tests.core.story import Story, wid, with_stage

DISTURBING = (
    m.AbortWorld,
    m.FormWorld,
    m.StopProgram,
    m.StopWorker,
    m.AskLeave,
    m.LeaveAt,
    m.RunProgram,
    m.StartWorker,
)
LIVE = [Stage.FORMING, Stage.RUNNING, Stage.PREPARING, Stage.ASKED, Stage.LEAVING]


def three(**limits) -> Story:
    """Three workers that train on two hosts, at commit 5."""
    return Story("a:2", "b:1", min=2, cooldown=(0.0, 0.0), **limits).run().commit(5)


def disturbed(story: Story, mark: int) -> list[m.Command]:
    return [command for command in story.said[mark:] if isinstance(command, DISTURBING)]


def trains(story: Story, *names: str) -> bool:
    """These do, by rank, and no step that was committed is lost."""
    world, fakes = story.world, story.fakes
    at = {fakes[w].commit for w in world.members}
    there = all(fakes[w].epoch == world.epoch and fakes[w].formed for w in world.members)
    return world.stage is Stage.RUNNING and there and len(at) == 1 and (not names or story.names == list(names))


# ---- nothing, or not yet anything, is under way ----


def test_an_idle_cluster_is_as_it_was():
    """No job: the workers are ready, none is started or stopped, and the next job runs on them."""
    story = Story("a:2", "b:1", min=2).answer()
    mark = story.mark()
    Away(story).new_driver()
    assert disturbed(story, mark) == []
    assert {worker.state for worker in story.world.workers.values()} == {WorkerState.READY}
    assert trains(story.run(), "a/0#1", "a/1#1", "b/0#1")


def test_workers_that_were_starting_start():
    """Some have not registered, or have not run the setup cells: they are waited for, and start as ever."""
    story = Story("a:2", "b:1", min=2)
    story.hear(m.AgentReady).hear(m.WorkerRegistered, "a/0#1")
    Away(story).new_driver()
    assert story.world.starting == {wid("a/1#1"), wid("b/0#1")}
    assert trains(story.run(), "a/0#1", "a/1#1", "b/0#1")


def test_a_host_whose_agent_was_starting_is_admitted_as_ever():
    """Its agent has not been heard, or not been dealt with: now it is; and one that cannot be used is refused."""
    story = Story("a:1", min=1).answer()
    story.add("b:1")
    Away(story).new_driver().answer()
    assert story.world.hosts["b"].phase is HostPhase.UP
    assert story.alive() == ["a/0#1", "b/0#1"]


def test_an_agent_that_does_not_speak_in_time_is_started_anew():
    """The host of one that was starting, or that hangs, is tried again at once."""
    story = Story("a:1", "b:1", min=1).answer()
    mark = story.mark()
    Away(story).new_driver(late=["b"]).answer()
    assert [command.host.name for command in story.commands(m.StartAgent, mark)] == ["b"]
    assert story.world.hosts["b"].phase is HostPhase.UP


@pytest.mark.parametrize("reached", [0, 1, 3])
def test_workers_that_never_heard_of_the_job_are_told(reached):
    """The driver dies as it starts the programs: who has not got one gets it, nobody gets two."""
    story = Story("a:2", "b:1", min=3).answer()
    away = Away(story, m.JobSubmitted("job"), reached=1 + reached)
    mark = story.mark()
    away.new_driver()
    assert len(story.commands(m.RunProgram, mark)) == 3 - reached
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1")
    assert story.world.resets == 0


def test_a_job_that_was_never_written_down_is_over():
    """Programs of a job of which nothing was saved: they are told to stop, and the cluster is free."""
    story = Story("a:2", min=1).answer()
    Away(story, m.JobSubmitted("job"), written=False).new_driver().quiet(6.0)
    assert story.world.job is None
    assert not any(fake.job for fake in story.fakes.values())
    assert trains(story.run("next"))


def test_programs_that_are_not_in_the_loop_yet_are_waited_for():
    """Some wait for a world, one is still on its way to the loop: it is waited for, and nobody is told to begin again."""
    story = Story("a:2", "b:1", min=3).answer()
    story.submit().hear(m.WorkerReady, "a/0#1")
    away = Away(story)
    story.fakes[wid("b/0#1")].word = None  # imports, say
    mark = story.mark()
    away.new_driver()
    assert story.world.waiting == {wid("a/0#1"), wid("a/1#1")}
    assert story.world.starting == {wid("b/0#1")}
    assert disturbed(story, mark) == []
    story._say_ready(wid("b/0#1"))
    assert trains(story.quiet(2.0))
    assert story.world.resets == 0


def test_a_first_world_that_was_forming_is_formed_again():
    """Nobody has trained yet: they are called back, no reset is counted, and the number of that epoch is not used again."""
    story = with_stage(Stage.FORMING)
    mark = story.mark()
    Away(story).new_driver()
    assert story.commands(m.AbortWorld, mark)[0].epoch == 1
    assert trains(story.quiet(2.0), "a/0#1", "b/0#1", "c/0#1")
    assert (story.world.resets, story.world.epoch) == (0, 2)


def test_a_first_world_that_has_formed_meanwhile_goes_on():
    """The order was out, all have joined and train: nobody is disturbed."""
    story = with_stage(Stage.FORMING)
    mark = story.mark()
    Away(story).form().commit(4).new_driver()
    assert disturbed(story, mark) == []
    assert trains(story, "a/0#1", "b/0#1", "c/0#1")
    assert story.job.formed


def test_an_order_that_reached_only_some_is_taken_back():
    """The driver dies as it forms a world: who waits for the others is called back, and all form the next one."""
    story = Story("a:2", "b:1", min=3).answer()
    story.submit().hear(m.WorkerReady, "a/0#1", "a/1#1")
    last = next(e for e in story.answers if isinstance(e, m.WorkerReady))
    Away(story, last, reached=1, written=False).new_driver()
    assert trains(story.quiet(2.0), "a/0#1", "a/1#1", "b/0#1")
    assert story.world.epoch == 2


# ---- a world that is whole ----


def test_a_world_that_is_whole_goes_on_undisturbed():
    """Same epoch, same members, same ranks; nobody is aborted, stopped or started; no step is lost."""
    story = three()
    before, mark = story.world, story.mark()
    Away(story).commit(100).new_driver()
    world = story.world
    assert disturbed(story, mark) == []
    assert (world.epoch, world.members, world.resets) == (before.epoch, before.members, 0)
    assert {story.fakes[w].commit for w in world.members} == {105}
    assert story.records("world-found") == ["3 workers train on in epoch 1"]
    story.quiet(60.0)
    assert disturbed(story, mark) == []


def test_the_ranks_are_what_the_workers_say():
    """Ranks that are not in the order of the hosts (an older one has come back) are kept."""
    story = three()
    story.kill("a/0#1").quiet(3.0)
    names = story.names
    Away(story).new_driver()
    assert trains(story, *names)


def test_after_it_planned_changes_work():
    """A host added and one removed under the new driver: the members change without an abort."""
    story = three()
    Away(story).commit(3).new_driver()
    mark = story.mark()
    assert trains(story.add("c:1").quiet(3.0), "a/0#1", "a/1#1", "b/0#1", "c/0#1")
    story.commit(3).answer().remove("a").quiet(3.0)
    assert trains(story, "b/0#1", "c/0#1")
    assert story.commands(m.AbortWorld, mark) == []
    assert len(story.commands(m.PrepareWorld, mark)) == 2
    assert story.world.resets == 0


def test_after_it_a_death_is_survived():
    """Rank 0 dies under the new driver: the newest commit is kept, a replacement with a new number joins."""
    story = three()
    Away(story).commit(3).new_driver()
    assert trains(story.kill("a/0#1").quiet(3.0), "a/1#1", "a/0#2", "b/0#1")
    assert story.fakes[wid("a/0#2")].commit >= 8


def test_two_new_drivers_one_after_the_other():
    """The second dies as well: the third finds the same world."""
    story = three()
    Away(story).commit().new_driver()
    mark = story.mark()
    Away(story).commit().new_driver()
    assert disturbed(story, mark) == []
    assert trains(story, "a/0#1", "a/1#1", "b/0#1")


def test_newcomers_that_wait_join_by_plan():
    """Two wait for a change when the driver dies: the new one makes it, and the members are not aborted."""
    story = three()
    story.add("c:2").answer(lambda e: not isinstance(e, m.WorkerReady))
    mark = story.mark()
    Away(story).new_driver()
    assert story.world.waiting == {wid("c/0#1"), wid("c/1#1")}
    story.quiet(3.0)
    assert trains(story)
    assert len(story.names) == 5
    assert story.commands(m.AbortWorld, mark) == []


# ---- a planned change is under way ----


@pytest.mark.parametrize("stage", [Stage.PREPARING, Stage.ASKED])
def test_what_was_prepared_is_called_off_and_done_again(stage):
    """While all members are still in their epoch: it is dropped, they stay, the newcomer waits, and then all change by plan."""
    story = with_stage(stage)
    mark = story.mark()
    Away(story).new_driver()
    assert (story.world.epoch, story.world.resets) == (1, 0)
    assert story.commands(m.DropWorld, mark)[0].epoch == 2
    assert [c.members for c in story.commands(m.Stay, mark)] == ([story.world.members] if stage is Stage.ASKED else [])
    assert all(set(c.members) == {wid("d/0#1")} for c in story.commands(m.AbortWorld, mark))
    assert trains(story.quiet(3.0), "a/0#1", "b/0#1", "c/0#1", "d/0#1")
    assert story.world.epoch > 2
    assert story.world.resets == 0


def test_who_has_promised_to_wait_is_told_to_go_on():
    """Only some were asked: all are told to stay, and nobody waits for ever."""
    story = with_stage(Stage.PREPARING)
    last = next(e for e in story.answers if isinstance(e, m.WorkerPrepared))
    story.answer(lambda e: isinstance(e, m.WorkerPrepared) and e is not last and e.worker != last.worker)
    mark = story.mark()
    Away(story, last, reached=3, written=False).new_driver()
    assert [fake.bound for fake in story.fakes.values()] == [False] * 4
    assert story.commands(m.Stay, mark)[0].members == story.world.members
    assert trains(story.quiet(3.0))


def test_nobody_has_left_yet():
    """The commit to leave at was agreed, no member has reached it: they stay, and change later."""
    story = with_stage(Stage.LEAVING)
    mark = story.mark()
    members = story.world.members
    Away(story, held=members).new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "b/0#1", "c/0#1", "d/0#1")
    assert not {w for c in story.commands(m.AbortWorld, mark) for w in c.members} & set(members)
    assert story.world.resets == 0


@pytest.mark.parametrize("held", [["a/0#1"], ["b/0#1", "c/0#1"]])
def test_some_have_left_and_some_not(held):
    """Some are in the prepared epoch, or on the way to it: all are called back, and train on together."""
    story = with_stage(Stage.LEAVING)
    Away(story, held=[wid(w) for w in held]).new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "b/0#1", "c/0#1", "d/0#1")
    assert story.world.resets == 1


def test_all_have_changed_over_meanwhile():
    """Everybody has left as agreed and the prepared world runs: it is found, and goes on."""
    story = with_stage(Stage.LEAVING)
    mark = story.mark()
    Away(story).form().commit(7).new_driver()
    assert disturbed(story, mark) == []
    assert trains(story, "a/0#1", "b/0#1", "c/0#1", "d/0#1")
    assert story.world.epoch == 2


def test_all_have_left_for_a_plain_change():
    """Nothing was prepared; all have left and wait: a world is formed of all, and that is no reset."""
    story = three()
    story.add("c:1").answer(lambda e: not isinstance(e, m.WorkerPrepared))
    story.send(m.WorkerPrepared(wid("c/0#1"), 2, "no way"))
    story.answer(lambda e: not isinstance(e, m.WorkerReady))
    assert story.world.stage is Stage.LEAVING
    Away(story).new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1", "c/0#1")
    assert story.world.resets == 0


def test_one_that_has_left_the_world_for_good_is_stopped():
    """A leaver was released and not yet stopped: it is told again, and its end is no strike."""
    story = three().remove("b")
    story.answer(lambda e: not isinstance(e, m.WorkerFormed))
    story.hear(m.WorkerFormed, "a/0#1")
    last = next(e for e in story.answers if isinstance(e, m.WorkerFormed))
    Away(story, last, reached=0).form().new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1")
    assert list(story.world.hosts) == ["a"]
    assert story.world.resets == 0


# ---- deaths meanwhile ----


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("victims", [["a/1#1"], ["a/0#1"], ["a/0#1", "b/0#1"]])
def test_members_that_died_meanwhile_are_replaced(victims, noticed):
    """Whoever it was, and whether the others have noticed or hang: one reset, the newest commit wins, replacements join."""
    story = three()
    Away(story).commit(4).kill(*victims, noticed=noticed).new_driver()
    assert trains(story.quiet(3.0))
    assert len(story.names) == 3
    assert story.fakes[story.world.members[0]].commit >= 9
    assert story.world.resets == 1
    assert not set(victims) & set(story.names)


@pytest.mark.parametrize("stage", LIVE)
def test_a_death_at_any_point(stage):
    """The driver dies, then rank 0, in whatever was going on: the others train on."""
    story = with_stage(stage)
    Away(story).kill("a/0#1").new_driver()
    assert trains(story.quiet(3.0))
    assert len(story.names) == (3 if stage in (Stage.FORMING, Stage.RUNNING) else 4)


def test_all_members_died():
    """Nobody is left who holds the state: the job fails and says so, and the next one runs."""
    story = three()
    Away(story).kill("a/0#1", "a/1#1", "b/0#1").new_driver()
    assert story.last(m.EndJob).outcome == "failed"
    assert "no worker is left that holds the training state" in story.last(m.EndJob).reason
    assert "no driver was there" in story.last(m.EndJob).reason
    assert trains(story.quiet(2.0).run("next"))


def test_all_died_before_anything_was_trained():
    """There is nothing to lose: the job begins with their replacements."""
    story = with_stage(Stage.FORMING)
    Away(story).kill("a/0#1", "b/0#1", "c/0#1").new_driver()
    assert trains(story.quiet(3.0), "a/0#2", "b/0#2", "c/0#2")


def test_a_whole_host_died():
    """Its agent is gone: it is tried again, and its workers come back with new numbers."""
    story = three()
    Away(story).lose_host("a").new_driver()
    assert story.records("host-lost") == ["a: its agent was lost while no driver was there"]
    story.quiet(4.0)
    assert trains(story)
    assert story.names[0] == "b/0#1"
    assert not {"a/0#1", "a/1#1"} & set(story.names)


def test_a_host_without_members_died():
    """The world is whole: nobody is disturbed, and the host is tried again."""
    story = three(max=3).add("c:1").quiet(2.0)
    epoch = story.world.epoch
    Away(story).lose_host("c").new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1")
    assert (story.world.epoch, story.world.resets) == (epoch, 0)
    assert story.world.hosts["c"].phase is HostPhase.UP


def test_a_newcomer_died():
    """One that was waiting to join: the world is whole, and its replacement joins by plan."""
    story = three()
    story.add("c:1").answer(lambda e: not isinstance(e, m.WorkerPrepared))
    Away(story).kill("c/0#1").new_driver()
    assert story.world.epoch == 1
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1", "c/0#2")
    assert story.world.resets == 0


def test_survivors_of_a_break_go_on_gathering():
    """The world had been broken and counted: the survivors gather, and it is not counted again."""
    story = three()
    story.kill("a/0#1").hear(m.WorkerReady, "a/1#1")
    assert story.world.stage is Stage.GATHERING
    Away(story).new_driver()
    assert trains(story.quiet(3.0))
    assert len(story.names) == 3
    assert story.world.resets == 1


@pytest.mark.parametrize("reached", [0, 1, 2])
def test_the_abort_reached_only_some(reached):
    """A member has died and the driver too, as it told the others: all are told, and gather."""
    story = three()
    story._forget(wid("a/0#1"))
    away = Away(story, m.WorkerExited(wid("a/0#1"), -9), reached=reached, written=reached > 0)
    away.break_off(1)
    away.new_driver()
    assert trains(story.quiet(3.0))
    assert story.world.resets == 1


def test_below_min_they_park():
    """Too few are left: they keep the state and wait, and go on when there are enough."""
    story = three()
    story.silent |= {wid("a/0#2"), wid("a/1#2"), wid("a/0#3"), wid("a/1#3")}
    Away(story).commit(2).lose_host("a").new_driver().answer()
    assert "1 of min 2 workers ready" in story.world.reason
    assert trains(story.add("c:1").quiet(3.0), "b/0#1", "c/0#1")
    assert story.fakes[wid("c/0#1")].commit == 7


@pytest.mark.parametrize("noticed", [True, False])
def test_a_member_that_is_frozen(noticed):
    """Its agent has it, it says nothing: it is killed and replaced, the others train on."""
    story = three()
    away = Away(story)
    if noticed:
        away.break_off(1)
    mark = story.mark()
    away.new_driver(frozen=["a/1#1"])
    assert story.commands(m.StopWorker, mark) == [m.StopWorker(wid("a/1#1"), kill=True)]
    assert trains(story.quiet(3.0), "a/0#1", "a/1#2", "b/0#1")


def test_a_newcomer_that_is_frozen_gets_no_program():
    """It may be in one: nothing is sent to it, and the world is not disturbed."""
    story = three().add("c:1")
    story.answer(lambda e: not isinstance(e, m.WorkerReady))
    mark = story.mark()
    Away(story).new_driver(frozen=["c/0#1"])
    assert disturbed(story, mark) == []
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1", "c/0#2")


# ---- endings ----


def test_the_users_own_error_ends_the_job():
    """Raised while nobody listened: the job fails with that rank's error, as it would have."""
    story = three()
    Away(story).commit().raised("a/1#1", "ValueError: bad").new_driver()
    end = story.last(m.EndJob)
    assert (end.outcome, end.reason, end.culprit) == ("failed", "rank 1 (a/1#1) raised ValueError: bad", wid("a/1#1"))
    assert trains(story.quiet(6.0).run("next"))
    assert len(story.names) == 3


def test_an_error_comes_before_newcomers():
    """A newcomer waits and a member has raised: no change is begun for a job that fails, and no program."""
    story = three().add("c:1").add("d:1")
    story.hear(m.AgentReady).hear(m.WorkerRegistered, "c/0#1")
    away = Away(story).raised("a/1#1")
    story.set_up.add(wid("d/0#1"))
    mark = story.mark()
    away.new_driver()
    assert story.job.outcome == "failed"
    assert {type(command) for command in disturbed(story, mark)} == {m.AbortWorld, m.StopProgram}


@pytest.mark.parametrize("reached", range(8))
@pytest.mark.parametrize("written", [True, False])
def test_a_job_that_was_failing_fails(reached, written):
    """The driver dies as it ends the job with a rank's error: as soon as one program or the file knows, it ends with that."""
    story = three()
    last = m.WorkerRaised(wid("a/1#1"), 1, intact=True, error="its own error")
    Away(story, last, reached=reached, written=written).new_driver().quiet(6.0)
    if written or reached not in (1, 2, 3):
        assert "rank 1 (a/1#1) raised its own error" in story.job.reason
        assert story.job.outcome == ("stopped" if reached == 4 and not written else "failed")
        assert len(story.commands(m.EndJob)) == (not written)
        assert trains(story.run("next"))
    else:  # nobody knows of the error any more, and the world was broken: it may come again
        assert trains(story)


@pytest.mark.parametrize("reached", range(8))
@pytest.mark.parametrize("written", [True, False])
def test_a_job_that_was_being_stopped_stops(reached, written):
    """The driver dies as it stops the job: as soon as one program or the file knows of it, all stop."""
    story = three()
    Away(story, m.JobStopRequested("job"), reached=reached, written=written).new_driver().quiet(6.0)
    if written or reached > 3:
        assert story.job.outcome == "stopped"
        assert not any(fake.job for fake in story.fakes.values())
        assert story.records("worker-killed") == []
        assert trains(story.run("next"))
    else:
        assert trains(story)


def test_some_have_succeeded():
    """One rank's function has returned: the others are waited for, nobody is disturbed, and the job succeeds."""
    story = three()
    mark = story.mark()
    Away(story).returned("a/1#1").new_driver()
    assert disturbed(story, mark) == []
    assert story.world.reason == "1 of 3 ranks have finished"
    story.returned("a/0#1", "b/0#1").ended("a/0#1", "a/1#1", "b/0#1")
    assert (story.job.outcome, story.job.reason) == ("succeeded", "every rank finished")


def test_all_have_succeeded_and_ended():
    """The whole job came to its end without a driver: it has succeeded, with every rank's result."""
    story = three()
    names = story.names
    Away(story).returned(*names).ended(*names).new_driver().answer()
    end = story.last(m.EndJob)
    assert (end.outcome, [str(w) for w in end.members], end.reason) == ("succeeded", names, "every rank finished")


def test_some_programs_had_ended_before():
    """Of one the old driver had heard already: it is heard again, and the job ends when the others have."""
    story = three()
    names = story.names
    story.returned(*names).ended("a/0#1")
    Away(story).ended("b/0#1").new_driver().answer()
    assert story.world.active
    story.ended("a/1#1")
    assert story.job.outcome == "succeeded"


def test_an_error_after_the_loop():
    """The function returned, the program then failed: so does the job, by the error that the worker kept."""
    story = three()
    names = story.names
    Away(story).returned(*names).ended(*names[:2]).ended(names[2], error="KeyError: x").new_driver().answer()
    assert story.job.outcome == "failed"
    assert "KeyError: x" in story.job.reason


def test_a_program_without_a_loop():
    """Nothing elastic in it: who has ended is not started again, and the job ends when all have."""
    story = Story("a:2", min=2).answer()
    story.submit()
    story._unsay(wid("a/0#1"), m.WorkerReady)
    story._unsay(wid("a/1#1"), m.WorkerReady)
    for fake in story.fakes.values():
        fake.word = None
    away = Away(story).ended("a/0#1")
    mark = story.mark()
    away.new_driver().answer()
    assert story.commands(m.RunProgram, mark) == []
    assert story.world.active
    assert story.ended("a/1#1").job.outcome == "succeeded"


def test_who_was_late_stays_late():
    """One finished, then one died, so that the third was told to stop: that is no error of its own, and the job succeeds."""
    story = three()
    story.returned("a/0#1").ended("a/0#1").kill("b/0#1")
    assert story.job.late == {wid("a/1#1")}
    Away(story).new_driver().answer()
    assert (story.job.outcome, story.job.reason) == ("succeeded", "2 of 3 ranks did not finish")


def test_a_death_after_others_have_finished():
    """One finished while nobody listened, another died: the third stops, nothing begins again, and the job succeeds."""
    story = three()
    Away(story).returned("a/0#1").ended("a/0#1").kill("b/0#1").new_driver().quiet(6.0)
    assert (story.job.outcome, story.job.reason) == ("succeeded", "2 of 3 ranks did not finish")
    assert [c.epoch for c in story.commands(m.FormWorld)] == [1]


def test_programs_linger_after_the_job_is_over():
    """The job has ended, a program has not: it is told again; if it does not stop it is killed, and the next job runs."""
    story = three()
    story.silent.add(wid("b/0#1"))
    story.stop_job().answer()
    story.fakes[wid("b/0#1")] = type(story.fakes[wid("b/0#1")])("job", epoch=1, numbered=1)
    story.silent.clear()
    away = Away(story)
    mark = story.mark()
    away.new_driver()
    assert [c.workers for c in story.commands(m.StopProgram, mark)] == [(wid("b/0#1"),)]
    story.answers.clear()
    story.quiet(6.0)
    assert story.records("worker-killed") == ["b/0#1 did not stop within 5 s and is killed"]
    assert trains(story.run("next"))


def test_the_lease_has_run_out_on_some():
    """They were told so by themselves: the job has been stopped, with that reason."""
    story = three()
    away = Away(story)
    fake = story.fakes[wid("a/1#1")]
    fake.stopped, fake.formed = "no driver has come for 60 s (lease)", False
    away.new_driver().quiet(6.0)
    assert (story.job.outcome, story.job.reason) == ("stopped", "no driver has come for 60 s (lease)")
    assert not any(fake.job for fake in story.fakes.values())


# ---- hosts and limits ----


def test_a_host_that_was_to_leave_leaves():
    """Draining when the driver died: its members leave by plan, and discovery may bring it back."""
    story = three().commit(3)
    story.discover("a:2", "b:1")
    story.remove("b")
    assert story.world.hosts["b"].phase is HostPhase.DRAINING
    mark = story.mark()
    Away(story).new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1")
    assert list(story.world.hosts) == ["a"]
    assert story.commands(m.AbortWorld, mark) == []
    story.discover("a:2", "b:1")
    assert list(story.world.hosts) == ["a"], "it was removed by hand"


def test_a_host_that_discovery_has_let_go_may_come_back():
    """It was drained, but not by hand: nobody takes it for one that people do not want."""
    story = Story(min=1)
    story.discover("a:1", "b:1")
    story.run().commit(3).discover("a:1")
    Away(story).new_driver().quiet(3.0)
    assert list(story.world.hosts) == ["a"]
    assert story.world.removed == frozenset()
    story.discover("a:1", "b:1")
    assert trains(story.quiet(3.0), "a/0#1", "b/0#2")


def test_a_draining_host_whose_agent_is_gone_has_left():
    """Nobody starts it again."""
    story = three().commit(3).remove("b")
    mark = story.mark()
    Away(story).lose_host("b").new_driver().quiet(3.0)
    assert list(story.world.hosts) == ["a"]
    assert story.commands(m.StartAgent, mark) == []
    assert trains(story, "a/0#1", "a/1#1")


@pytest.mark.parametrize("written", [True, False])
def test_a_host_that_was_removed_stays_removed(written):
    """Its agent was to end and has not heard so: it is told again, and discovery's list does not bring the host back."""
    story = Story("a:1", "b:1", min=1).answer()
    story.remove("b")
    (last,) = [e for e in story.answers if isinstance(e, m.WorkerExited)]
    away = Away(story, last, reached=0, written=written)
    assert "b" in story.agents
    mark = story.mark()
    away.new_driver().quiet(3.0)
    assert "b" in [c.host for c in story.commands(m.StopAgent, mark)]
    assert (list(story.world.hosts), "b" in story.agents) == (["a"], False)
    story.discover("a:1", "b:1")
    assert list(story.world.hosts) == ["a"]


def test_a_lost_host_whose_agent_lives_is_started_anew():
    """It was left out and its agent did not hear that it is to end: that one ends, with all its workers."""
    story = three()
    last = m.AgentLost("b", "it was silent")
    Away(story, last).new_driver().quiet(3.0)
    assert trains(story)
    assert "b/0#1" not in story.names
    assert "b/0#1" not in story.alive()


def test_slots_that_were_taken_away_stay_away():
    """The host has fewer slots now: its surplus member leaves by plan."""
    story = three().commit(3).add("a:1")
    mark = story.mark()
    Away(story).new_driver().quiet(3.0)
    assert trains(story, "a/0#1", "b/0#1")
    assert story.commands(m.AbortWorld, mark) == []


def test_the_limits_are_those_of_the_last_order():
    """Scaled before the driver died, and not yet carried out: it is now, by plan."""
    story = three().commit(3)
    Away(story, m.Scaled(1, 2, "a test"), reached=0).new_driver()
    assert (story.world.limits.min, story.world.limits.max) == (1, 2)
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1")
    assert story.world.resets == 0


def test_no_incarnation_is_used_twice():
    """Not of workers that were started and never written down, nor of those that died with their agent: see `StartWorker`."""
    story = three()
    story._forget(wid("b/0#1"))
    Away(story, m.WorkerExited(wid("b/0#1"), -9), written=False).lose_host("b").new_driver().quiet(3.0)
    assert "b/0#3" in story.alive()
    assert trains(story)


def test_a_host_that_was_admitted_unsaved():
    """Its first worker was started, which was not written down, and has died: the next one has another number."""
    story = Story("a:1", min=1)
    (last,) = story.answers
    Away(story, last, written=False).kill("a/0#1").new_driver().answer()
    assert story.alive() == ["a/0#2"]


def test_slots_that_come_back_have_new_workers():
    """The host had more slots once: their workers' numbers are not used again, though its new agent never knew of them."""
    story = Story("a:3", min=1).answer()
    story.add("a:1").answer()
    story.lose_host("a").add("a:1").answer()
    Away(story).new_driver().answer()
    Away(story).new_driver().answer()
    story.remove("a").answer()
    story.add("a:3").answer()
    assert story.alive() == ["a/0#3", "a/1#3", "a/2#3"]


def test_resets_count_on():
    """Breaks before, at and after the takeover are one count."""
    story = three(reset_limit=3)
    story.kill("a/0#1").quiet(3.0)
    Away(story).kill("a/1#1").new_driver().quiet(3.0)
    assert story.world.resets == 2
    story.kill("b/0#1").quiet(3.0)
    assert trains(story)
    story.kill(story.alive()[0])
    assert "4 resets exceed reset_limit=3" in story.job.reason


def test_who_is_missing_is_named():
    """The driver waits for hosts of which no agent has spoken, and for workers of the agents that have."""
    story = three()
    away = Away(story)
    agents = {"a": away.hello("a")}
    assert missing(summary(story.world), agents, [wid("a/0#1")]) == ("b", "a/1#1")
