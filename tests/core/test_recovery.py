"""A cluster's driver is killed, things happen or not, and a new driver comes: see `away.Away`."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import HostPhase, Stage, WorkerState
from nbelastic.protocol import events as ev
from tests.core.away import Away, disturbed, three, trains
from tests.core.story import Story, wid, with_stage

LIVE = [Stage.FORMING, Stage.RUNNING, Stage.PREPARING, Stage.ASKED, Stage.LEAVING]


# ---- nothing, or not yet anything, is under way ----


def test_an_idle_cluster_is_as_it_was():
    """No job: the workers are ready, none is started or stopped, and the next job runs on them."""
    story = Story("a:2", "b:1", min=2).answer()
    mark = story.mark()
    Away(story).new_driver()
    assert disturbed(story, mark) == []
    assert {worker.state for worker in story.cluster.workers.values()} == {WorkerState.READY}
    assert trains(story.run(), "a/0#1", "a/1#1", "b/0#1")


def test_workers_that_were_starting_start():
    """Some have not registered, or have not run the setup cells: they are waited for, and start as ever."""
    story = Story("a:2", "b:1", min=2)
    story.hear(ev.AgentReady).hear(ev.WorkerRegistered, "a/0#1")
    Away(story).new_driver()
    assert story.cluster.starting == {wid("a/1#1"), wid("b/0#1")}
    assert trains(story.run(), "a/0#1", "a/1#1", "b/0#1")


def test_a_host_whose_agent_was_starting_is_admitted_as_ever():
    """Its agent has not been heard, or not been dealt with: now it is; and one that cannot be used is refused."""
    story = Story("a:1", min=1).answer()
    story.add("b:1")
    Away(story).new_driver().answer()
    assert story.cluster.hosts["b"].phase is HostPhase.UP
    assert story.alive() == ["a/0#1", "b/0#1"]


def test_an_agent_that_does_not_speak_in_time_is_started_anew():
    """The host of one that was starting, or that hangs, is tried again at once."""
    story = Story("a:1", "b:1", min=1).answer()
    mark = story.mark()
    Away(story).new_driver(late=["b"]).answer()
    assert [command.host.name for command in story.commands(cmd.StartAgent, mark)] == ["b"]
    assert story.cluster.hosts["b"].phase is HostPhase.UP


def test_a_host_that_is_still_on_its_way():
    """Its job waits in a queue: it is not submitted again, keeps its host starting, and is admitted when it speaks."""
    story = Story("a:1", min=1).answer()
    story.add("b:1")
    mark = story.mark()
    Away(story).new_driver(coming=["b"])
    assert story.cluster.hosts["b"].phase is HostPhase.STARTING
    story.answer()
    assert story.commands(cmd.StartAgent, mark) == []
    assert story.alive() == ["a/0#1", "b/0#1"]


def test_a_host_that_was_there_is_not_on_its_way():
    """Its job runs, and its agent does not speak: it is lost, and tried again."""
    story = Story("a:1", "b:1", min=1).answer()
    mark = story.mark()
    story.end_agent("b")
    Away(story).new_driver(coming=["b"]).answer()
    assert [command.host.name for command in story.commands(cmd.StartAgent, mark)] == ["b"]


def test_failures_are_not_forgotten():
    """A slot that cools goes on cooling until its time, and its next death makes the pause longer; restarts are counted on."""
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
    """Whoever comes meanwhile does not try it sooner."""
    story = Story("a:1", "b:1", min=1, cooldown=(8.0, 64.0)).answer().lose_host("b").answer()
    mark = story.mark()
    Away(story).new_driver().answer().wait(7.0)
    assert story.commands(cmd.StartAgent, mark) == []
    story.wait(1.0)
    assert [command.host.name for command in story.commands(cmd.StartAgent, mark)] == ["b"]


@pytest.mark.parametrize("reached", [0, 1, 3])
def test_workers_that_never_heard_of_the_job_are_told(reached):
    """The driver dies as it starts the programs: who has not got one gets it, nobody gets two."""
    story = Story("a:2", "b:1", min=3).answer()
    away = Away(story, ev.JobSubmitted("job"), reached=1 + reached)
    mark = story.mark()
    away.new_driver()
    assert len(story.commands(cmd.RunProgram, mark)) == 3 - reached
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1")
    assert story.cluster.resets == 0


def test_a_job_that_was_never_written_down_is_over():
    """Programs of a job of which nothing was saved: they are told to stop, and the cluster is free."""
    story = Story("a:2", min=1).answer()
    Away(story, ev.JobSubmitted("job"), written=False).new_driver().quiet(6.0)
    assert story.cluster.job is None
    assert not any(fake.job for fake in story.fakes.values())
    assert trains(story.run("next"))


def test_programs_that_are_not_in_the_loop_yet_are_waited_for():
    """Some wait for a world, one is still on its way to the loop: it is waited for, and nobody is told to begin again."""
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
    """Nobody has trained yet: they are called back, no reset is counted, and the number of that generation is not used again."""
    story = with_stage(Stage.FORMING)
    mark = story.mark()
    Away(story).new_driver()
    assert story.commands(cmd.AbortWorld, mark)[0].generation == 1
    assert trains(story.quiet(2.0), "a/0#1", "b/0#1", "c/0#1")
    assert (story.cluster.resets, story.cluster.generation) == (0, 2)


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
    story.submit().hear(ev.WorkerReady, "a/0#1", "a/1#1")
    last = next(e for e in story.answers if isinstance(e, ev.WorkerReady))
    Away(story, last, reached=1, written=False).new_driver()
    assert trains(story.quiet(2.0), "a/0#1", "a/1#1", "b/0#1")
    assert story.cluster.generation == 2


# ---- a world that is whole ----


def test_a_world_that_is_whole_goes_on_undisturbed():
    """Same generation, same members, same ranks; nobody is aborted, stopped or started; no step is lost."""
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


def test_the_ranks_are_what_the_workers_say():
    """Ranks that are not in the order of the hosts (an older one has come back) are kept."""
    story = three()
    story.kill("a/0#1").quiet(3.0)
    names = story.names
    Away(story).new_driver()
    assert trains(story, *names)


def test_survivors_keep_their_order():
    """A member died meanwhile: those who are left are ranked as before, whoever answers the new driver first."""
    story = Story("a:1", "b:1", "c:1", "d:1", min=1).run().quiet(60.0)
    story.kill("b/0#1").quiet(3.0)
    assert story.names == ["a/0#1", "c/0#1", "d/0#1", "b/0#2"]
    Away(story).kill("c/0#1").new_driver()
    story.quiet(3.0)
    assert story.names == ["a/0#1", "d/0#1", "b/0#2", "c/0#2"]


def test_after_it_planned_changes_work():
    """A host added and one removed under the new driver: the members change without an abort."""
    story = three()
    Away(story).commit(3).new_driver()
    mark = story.mark()
    assert trains(story.add("c:1").quiet(3.0), "a/0#1", "a/1#1", "b/0#1", "c/0#1")
    story.commit(3).answer().remove("a").quiet(3.0)
    assert trains(story, "b/0#1", "c/0#1")
    assert story.commands(cmd.AbortWorld, mark) == []
    assert len(story.commands(cmd.PrepareWorld, mark)) == 2
    assert story.cluster.resets == 0


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
    story.add("c:2").answer(lambda e: not isinstance(e, ev.WorkerReady))
    mark = story.mark()
    Away(story).new_driver()
    assert story.cluster.newcomers == {wid("c/0#1"), wid("c/1#1")}
    story.quiet(3.0)
    assert trains(story)
    assert len(story.names) == 5
    assert story.commands(cmd.AbortWorld, mark) == []


# ---- a planned change is under way ----


@pytest.mark.parametrize("stage", [Stage.PREPARING, Stage.ASKED])
def test_what_was_prepared_is_called_off_and_done_again(stage):
    """While all members are still in their generation: it is dropped, they stay, the newcomer waits, and then all change by plan."""
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


def test_who_has_promised_to_wait_is_told_to_go_on():
    """Only some were asked: all are told to stay, and nobody waits for ever."""
    story = with_stage(Stage.PREPARING)
    last = next(e for e in story.answers if isinstance(e, ev.WorkerPrepared))
    story.answer(lambda e: isinstance(e, ev.WorkerPrepared) and e is not last and e.worker != last.worker)
    mark = story.mark()
    Away(story, last, reached=3, written=False).new_driver()
    assert [fake.bound for fake in story.fakes.values()] == [False] * 4
    assert story.commands(cmd.CancelLeave, mark)[0].members == story.cluster.members
    assert trains(story.quiet(3.0))


def test_nobody_has_left_yet():
    """The commit to leave at was agreed, no member has reached it: they stay, and change later."""
    story = with_stage(Stage.LEAVING)
    mark = story.mark()
    members = story.cluster.members
    Away(story, held=members).new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "b/0#1", "c/0#1", "d/0#1")
    assert not {w for c in story.commands(cmd.AbortWorld, mark) for w in c.members} & set(members)
    assert story.cluster.resets == 0


@pytest.mark.parametrize("held", [["a/0#1"], ["b/0#1", "c/0#1"]])
def test_some_have_left_and_some_not(held):
    """Some are in the prepared generation, or on the way to it: all are called back, and train on together."""
    story = with_stage(Stage.LEAVING)
    Away(story, held=[wid(w) for w in held]).new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "b/0#1", "c/0#1", "d/0#1")
    assert story.cluster.resets == 1


def test_all_have_changed_over_meanwhile():
    """Everybody has left as agreed and the prepared world runs: it is found, and goes on."""
    story = with_stage(Stage.LEAVING)
    mark = story.mark()
    Away(story).form().commit(7).new_driver()
    assert disturbed(story, mark) == []
    assert trains(story, "a/0#1", "b/0#1", "c/0#1", "d/0#1")
    assert story.cluster.generation == 2


def test_all_have_left_for_a_plain_change():
    """Nothing was prepared; all have left and wait: a world is formed of all, and that is no reset."""
    story = three()
    story.add("c:1").answer(lambda e: not isinstance(e, ev.WorkerPrepared))
    story.send(ev.WorkerPrepared(wid("c/0#1"), 2, "no way"))
    story.answer(lambda e: not isinstance(e, ev.WorkerReady))
    assert story.cluster.stage is Stage.LEAVING
    Away(story).new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1", "c/0#1")
    assert story.cluster.resets == 0


def test_one_that_has_left_the_world_for_good_is_stopped():
    """A leaver was released and not yet stopped: it is told again, and its end is no strike."""
    story = three().remove("b")
    story.answer(lambda e: not isinstance(e, ev.WorkerFormed))
    story.hear(ev.WorkerFormed, "a/0#1")
    last = next(e for e in story.answers if isinstance(e, ev.WorkerFormed))
    Away(story, last, reached=0).form().new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1")
    assert list(story.cluster.hosts) == ["a"]
    assert story.cluster.resets == 0


# ---- deaths meanwhile ----


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("victims", [["a/1#1"], ["a/0#1"], ["a/0#1", "b/0#1"]])
def test_members_that_died_meanwhile_are_replaced(victims, noticed):
    """Whoever it was, and whether the others have noticed or hang: one reset, the newest commit wins, replacements join."""
    story = three()
    Away(story).commit(4).kill(*victims, noticed=noticed).new_driver()
    assert trains(story.quiet(3.0))
    assert len(story.names) == 3
    assert story.fakes[story.cluster.members[0]].commit >= 9
    assert story.cluster.resets == 1
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
    assert story.last(cmd.EndJob).outcome == "failed"
    assert "no worker is left that holds the training state" in story.last(cmd.EndJob).reason
    assert "no driver was running" in story.last(cmd.EndJob).reason
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
    assert story.records("host-lost") == ["a: its agent was lost while no driver was running"]
    story.quiet(4.0)
    assert trains(story)
    assert story.names[0] == "b/0#1"
    assert not {"a/0#1", "a/1#1"} & set(story.names)


def test_a_host_without_members_died():
    """The world is whole: nobody is disturbed, and the host is tried again."""
    story = three(max=3).add("c:1").quiet(2.0)
    generation = story.cluster.generation
    Away(story).lose_host("c").new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1")
    assert (story.cluster.generation, story.cluster.resets) == (generation, 0)
    assert story.cluster.hosts["c"].phase is HostPhase.UP


def test_a_newcomer_died():
    """One that was waiting to join: the world is whole, and its replacement joins by plan."""
    story = three()
    story.add("c:1").answer(lambda e: not isinstance(e, ev.WorkerPrepared))
    Away(story).kill("c/0#1").new_driver()
    assert story.cluster.generation == 1
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1", "c/0#2")
    assert story.cluster.resets == 0


def test_survivors_of_a_break_go_on_gathering():
    """The world had been broken and counted: the survivors gather, and it is not counted again."""
    story = three()
    story.kill("a/0#1").hear(ev.WorkerReady, "a/1#1")
    assert story.cluster.stage is Stage.GATHERING
    Away(story).new_driver()
    assert trains(story.quiet(3.0))
    assert len(story.names) == 3
    assert story.cluster.resets == 1


@pytest.mark.parametrize("reached", [0, 1, 2])
def test_the_abort_reached_only_some(reached):
    """A member has died and the driver too, as it told the others: all are told, and gather."""
    story = three()
    story._forget(wid("a/0#1"))
    away = Away(story, ev.WorkerExited(wid("a/0#1"), -9), reached=reached, written=reached > 0)
    away.break_off(1)
    away.new_driver()
    assert trains(story.quiet(3.0))
    assert story.cluster.resets == 1


def test_below_min_they_park():
    """Too few are left: they keep the state and wait, and go on when there are enough."""
    story = three()
    story.silent |= {wid("a/0#2"), wid("a/1#2"), wid("a/0#3"), wid("a/1#3")}
    Away(story).commit(2).lose_host("a").new_driver().answer()
    assert "1 of min 2 workers ready" in story.reason
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
    story.hear(ev.WorkerFrozen)
    assert story.commands(cmd.StopWorker, mark) == [cmd.StopWorker(wid("a/1#1"), kill=True)]
    assert trains(story.quiet(3.0), "a/0#1", "a/1#2", "b/0#1")


def test_a_member_that_has_not_answered_yet_is_not_disturbed():
    """It holds the interpreter lock, say, and its process runs: it trains on with all others, and is missed by its silence."""
    story = three()
    mark = story.mark()
    Away(story).new_driver(frozen=["a/1#1"])
    story.answers = []  # its process is not stopped
    assert disturbed(story, mark) == []
    assert story.names == ["a/0#1", "a/1#1", "b/0#1"]
    story.quiet(3.0).commit(3)
    assert trains(story, "a/0#1", "a/1#1", "b/0#1")
    story.send(ev.WorkerSilent(wid("a/1#1"), 60.0, idle=True))
    assert trains(story.quiet(3.0), "a/0#1", "a/1#2", "b/0#1")


def test_a_member_that_has_not_answered_where_another_is_gone():
    """The world is not whole, and the others would wait for it: it is replaced, too."""
    story = three()
    mark = story.mark()
    Away(story).kill("b/0#1").new_driver(frozen=["a/1#1"])
    assert story.commands(cmd.StopWorker, mark) == [cmd.StopWorker(wid("a/1#1"), kill=True)]
    assert trains(story.quiet(3.0), "a/0#1", "a/1#2", "b/0#2")


def test_a_newcomer_that_is_frozen_gets_no_program():
    """It may be in one: nothing is sent to it, and the world is not disturbed."""
    story = three().add("c:1")
    story.answer(lambda e: not isinstance(e, ev.WorkerReady))
    mark = story.mark()
    Away(story).new_driver(frozen=["c/0#1"])
    assert disturbed(story, mark) == []
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1", "c/0#2")


@pytest.mark.parametrize("reached", [1, 2, 3])
def test_a_preparation_of_which_only_some_have_heard_is_dropped(reached):
    """The driver dies as it tells the members to prepare the next world: whatever some have prepared is dropped by all."""
    story = Story("c:1", "a:1", "b:1", min=2).run().commit(3).answer()
    story.add("d:1").answer(lambda e: not isinstance(e, ev.WorkerReady | ev.WorkerPrepared))
    newcomer = next(e for e in story.answers if isinstance(e, ev.WorkerReady))
    story.answers.remove(newcomer)
    mark = story.mark()
    away = Away(story, newcomer, reached=1 + reached)  # a record, and so many of the members
    assert (
        sorted(fake.numbered for w, fake in story.fakes.items() if w.host != "d") == [1] * (3 - reached) + [2] * reached
    )
    away.new_driver()
    assert [(c.generation, len(c.members)) for c in story.commands(cmd.DropWorld, mark)] == [(2, 3)]
    assert trains(story.quiet(3.0), "c/0#1", "a/0#1", "b/0#1", "d/0#1")
