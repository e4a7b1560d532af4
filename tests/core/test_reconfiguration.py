"""Reconfigurations: newcomers are ready before members are asked, and all members leave at one commit."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from tests.core.story import Story, wid


def test_newcomers_are_ready_before_members_are_asked():
    """A host is added: the members are asked for nothing until its workers wait in the elastic loop."""
    story = Story("a:2", min=1).run()
    mark = story.mark()
    story.add("b:2").hear(ev.AgentReady).hear(ev.WorkerRegistered).wait(30.0)
    assert story.commands(cmd.AskLeave, mark) == []
    story.hear(ev.WorkerReady)
    assert [ask.members for ask in story.commands(cmd.AskLeave, mark)] == [story.cluster.members]


def test_all_leave_at_the_commit_after_the_newest():
    """Ranks are at different commits: the leave point is the first commit that none has made."""
    story = Story("a:3", min=1).run().commit(4)
    story.add("b:1").answer(lambda e: not isinstance(e, ev.LeaveAcknowledged))
    story.send(
        *(
            ev.LeaveAcknowledged(w, 1, commit, story.cluster.ask_number)
            for w, commit in zip(story.cluster.members, (4, 6, 5), strict=True)
        )
    )
    leave = story.last(cmd.LeaveAt)
    assert (leave.generation, leave.commit, leave.members) == (1, 7, story.cluster.members)


def test_a_repeated_acknowledgement_counts_once():
    """A repeated `LeaveAcknowledged` counts once; the agreement waits for the other ranks."""
    story = Story("a:2", min=1).run()
    story.add("b:1").answer(lambda e: not isinstance(e, ev.LeaveAcknowledged))
    story.send(*[ev.LeaveAcknowledged(wid("a/0#1"), 1, 3, story.cluster.ask_number)] * 3)
    assert story.cluster.stage is Stage.ASKED
    assert story.reason == "1 of 2 have reported where they are"


def test_a_lone_replacement_joins_at_once():
    """A newcomer does not wait for the settle time if no other worker is starting."""
    story = Story("a:3", min=2).run()
    story.kill("a/2#1")
    story.answer()
    assert story.names == ["a/0#1", "a/1#1", "a/2#2"]


def test_two_changes_in_one_second_are_one_reset():
    """Two hosts come within the settle time: one reconfiguration adds both."""
    story = Story("a:1", min=1).run()
    mark = story.mark()
    story.add("b:1").add("c:1").hear(ev.AgentReady)
    story.answer(lambda e: getattr(e, "worker", wid("c/0#1")).host == "b")
    assert story.cluster.stage is Stage.RUNNING
    assert story.reason.startswith("1 workers train in generation 1; waiting for c/0#1")
    story.wait(0.9).quiet(1.0)
    assert [len(order.members) for order in story.commands(cmd.FormWorld, mark)] == [3]


def test_a_slow_newcomer_does_not_delay_a_ready_one():
    """A newcomer is slower than the settle time: the ready one joins first, the slow one later."""
    story = Story("a:1", min=1).run()
    story.add("b:1").add("c:1").hear(ev.AgentReady)
    story.answer(lambda e: getattr(e, "worker", wid("c/0#1")).host == "b")
    story.wait(1.0).answer(lambda e: getattr(e, "worker", wid("c/0#1")).host != "c")
    assert story.names == ["a/0#1", "b/0#1"]
    story.quiet(1.0)
    assert story.names == ["a/0#1", "b/0#1", "c/0#1"]


def test_a_second_change_while_the_first_is_under_way():
    """Another host is removed before the members have left: one reconfiguration makes both changes."""
    story = Story("a:1", "b:1", "c:1", min=1).run()
    mark = story.mark()
    story.remove("b")
    assert story.cluster.stage is Stage.ASKED
    story.remove("c").quiet(2.0)
    assert story.names == ["a/0#1"]
    assert len(story.commands(cmd.FormWorld, mark)) == 1


def test_a_change_while_the_world_forms_comes_after_it():
    """A host is removed while its workers form: the world forms first, then they leave."""
    story = Story("a:1", "b:1", min=1)
    story.answer()
    story.submit().hear(ev.WorkerReady)
    assert story.cluster.stage is Stage.FORMING
    story.remove("b").quiet(2.0)
    assert (story.names, story.cluster.generation, story.cluster.resets) == (["a/0#1"], 2, 0)
    assert story.commands(cmd.AbortWorld) == []


def test_drained_workers_leave_at_a_commit_and_exit():
    """A removed host's workers leave at the commit, are stopped, not killed, and have no failures."""
    story = Story("a:2", "b:2", min=1).run()
    mark = story.mark()
    story.remove("b")
    assert story.commands(cmd.StopWorker, mark) == []
    story.answer()
    assert sorted(story.commands(cmd.StopWorker, mark), key=str) == [cmd.StopWorker(wid(f"b/{i}#1")) for i in (0, 1)]
    assert (story.names, list(story.cluster.hosts)) == (["a/0#1", "a/1#1"], ["a"])
    assert story.last(cmd.StopAgent).host == "b"
    assert story.records("worker-lost") + story.records("slot-backoff") == []
    assert story.cluster.resets == 0


def test_a_removed_hosts_place_is_taken_in_the_same_change():
    """With max full, replacements of a removed host start first, and one reconfiguration makes both changes."""
    story = Story("a:1", "b:1", "c:1", min=1, max=2).run()
    mark = story.mark()
    story.remove("b").wait(0.9)
    assert story.commands(cmd.AskLeave, mark) == []
    story.quiet(2.0)
    assert story.names == ["a/0#1", "c/0#1"]
    assert len(story.commands(cmd.FormWorld, mark)) == 1


def test_a_drained_host_waits_no_longer_than_the_settle_time():
    """The replacement is slow: after the settle time the host's workers leave without it."""
    story = Story("a:1", "b:1", "c:1", min=1, max=2).run()
    mark = story.mark()
    story.remove("b").wait(1.0)
    assert len(story.commands(cmd.AskLeave, mark)) == 1


def test_replacements_are_waited_for_rather_than_going_below_min():
    """A host leaves while newcomers start: the world trains on at min until they are ready."""
    story = Story("a:1", "b:1", min=2).run()
    mark = story.mark()
    story.add("c:1").hear(ev.AgentReady).remove("b").wait(30.0)
    assert story.commands(cmd.AskLeave, mark) == []
    assert "waiting for c/0#1" in story.reason
    story.quiet(1.0)
    assert story.names == ["a/0#1", "c/0#1"]


def test_a_drain_below_min_parks_the_rest():
    """A host leaves without replacements: the others wait below min, with their state and a reason."""
    story = Story("a:1", "b:1", min=2).run().commit(5)
    story.remove("b").quiet(5.0)
    assert (story.alive(), list(story.cluster.hosts), story.cluster.phase) == (["a/0#1"], ["a"], "waiting")
    assert story.reason == "1 of min 2 workers ready; add a host or lower min"
    story.add("c:1").quiet(3.0)
    assert (story.names, story.fakes[wid("c/0#1")].commit) == (["a/0#1", "c/0#1"], 6)


def test_lowering_min_lets_the_parked_go_on():
    """Survivors below min train again after `--min` is lowered."""
    story = Story("a:1", "b:1", min=2).run()
    story.remove("b").quiet(2.0).scale(1, None).quiet(1.0)
    assert (story.names, story.cluster.stage) == (["a/0#1"], Stage.RUNNING)


def test_raising_min_disturbs_no_running_world():
    """min is raised above the world's size: the world trains on and grows when it can."""
    story = Story("a:2", min=1).run()
    mark = story.mark()
    story.scale(5, None).add("b:1").quiet(5.0)
    assert (story.cluster.stage, story.cluster.generation) == (Stage.RUNNING, 1)
    story.add("c:2").quiet(5.0)
    assert [len(order.members) for order in story.commands(cmd.FormWorld, mark)] == [5]


def test_the_last_holder_of_the_state_stays_until_it_has_handed_it_over():
    """The only host is removed: one of its workers stays until another host has the state."""
    story = Story("a:2", min=1).run().commit(5)
    story.remove("a").quiet(3.0)
    assert (story.names, story.cluster.stage) == (["a/0#1"], Stage.RUNNING)
    assert "the last worker with the training state has to leave" in story.reason
    story.add("b:2").quiet(5.0)
    assert story.names == ["b/0#1", "b/1#1"]
    assert list(story.cluster.hosts) == ["b"]
    assert story.fakes[wid("b/0#1")].commit >= 5
    assert story.cluster.resets == 0


def test_the_last_holder_parks_below_min_and_hands_over_later():
    """With min=2 the last holder waits, and is in the next world before it leaves."""
    story = Story("a:2", min=2).run().commit(5)
    story.remove("a").quiet(3.0)
    assert (story.cluster.phase, story.alive()) == ("waiting", ["a/0#1"])
    story.add("b:2").quiet(5.0)
    assert story.names == ["b/0#1", "b/1#1"]
    assert story.fakes[wid("b/1#1")].commit >= 5


def test_scaling_down_takes_the_highest_ranks():
    """max goes from 4 to 2: the two highest ranks leave at a commit."""
    story = Story("a:2", "b:2", min=1).run()
    story.scale(1, 2).quiet(2.0)
    assert (story.names, story.alive()) == (["a/0#1", "a/1#1"], ["a/0#1", "a/1#1"])
    assert story.cluster.resets == 0


def test_scaling_up_brings_all_in_one_change():
    """max goes from 1 to 4 with a spare: one reconfiguration, after the settle time, adds all."""
    story = Story("a:2", "b:2", min=1, max=1, spares=1).run()
    mark = story.mark()
    story.wait(60.0).scale(1, 4)
    assert story.commands(cmd.AskLeave, mark) == []
    story.quiet(2.0)
    assert [len(order.members) for order in story.commands(cmd.FormWorld, mark)] == [4]


def test_scaling_down_and_up_again_in_the_middle_of_the_change():
    """max is raised again before the leavers have left: the world ends at the wanted size."""
    story = Story("a:4", min=1).run()
    story.scale(1, 2)
    assert story.cluster.stage is Stage.ASKED
    story.scale(1, 4).quiet(5.0)
    assert len(story.names) == 4
    assert story.cluster.resets == 0


def test_scaling_down_while_agreeing_and_leaving():
    """max is lowered again and again during a reconfiguration: no world exceeds it."""
    story = Story("a:4", min=1).run()
    story.add("b:1").answer(lambda e: not isinstance(e, ev.LeaveAcknowledged)).scale(1, 3).hear(ev.LeaveAcknowledged)
    assert story.cluster.stage is Stage.LEAVING
    story.scale(1, 2).quiet(3.0)
    assert story.names == ["a/0#1", "a/1#1"]


def test_members_that_have_left_are_not_awaited_again():
    """A member is lost during a reconfiguration: only members that have not left yet are awaited."""
    story = Story("a:3", min=1).run()
    story.add("b:1").answer(lambda e: not isinstance(e, ev.WorkerReady) or e.worker == wid("b/0#1"))
    assert story.cluster.stage is Stage.LEAVING
    story.hear(ev.WorkerReady, "a/0#1").kill("a/2#1")
    assert story.cluster.awaiting == {wid("a/1#1")}


@pytest.mark.parametrize("victim", ["a/0#1", "b/0#1"])
def test_a_death_while_a_drained_host_leaves(victim):
    """A member is lost during a drain: one break, and the drain is completed."""
    story = Story("a:2", "b:2", min=1, cooldown=(0.0, 0.0)).run()
    story.remove("b").kill(victim).quiet(3.0)
    assert list(story.cluster.hosts) == ["a"]
    assert {w.host for w in story.cluster.members} == {"a"}
    assert (story.cluster.stage, len(story.names), story.cluster.resets) == (Stage.RUNNING, 2, 1)


def test_a_drain_is_forced_when_the_user_loses_patience():
    """A draining host is removed with `--now`: its workers are killed and counted out once."""
    story = Story("a:1", "b:1", "c:1", min=1, max=2).run()
    story.remove("b").remove("b", now=True).quiet(3.0)
    assert story.names == ["a/0#1", "c/0#1"]
    assert len(story.alive()) == 2


def test_a_drained_host_without_members_goes_at_once():
    """Idle workers of a removed host need no commit to leave at."""
    story = Story("a:1", "b:1", min=1)
    story.answer()
    story.remove("b").answer()
    assert list(story.cluster.hosts) == ["a"]


def test_a_host_removed_while_it_starts_is_gone_at_once():
    """A host is removed while it starts: its agent is stopped without a wait."""
    story = Story("a:1", min=1)
    story.remove("a")
    assert story.last(cmd.StopAgent).host == "a"
    assert story.cluster.hosts == {}


def test_a_worker_that_need_not_leave_any_more_waits_for_the_next_world():
    """A removed host is added again, with fewer slots, after all have left: its worker joins the next world."""
    story = Story("b:2", "a:1", min=1).run().commit(3).answer()
    story.remove("b").answer(lambda e: not isinstance(e, ev.WorkerReady))
    assert story.cluster.stage is Stage.LEAVING
    story.add("b:1").quiet(2.0)
    assert story.names == ["a/0#1", "b/0#1"]
    assert story.alive() == ["b/0#1", "a/0#1"]


def test_a_newcomer_does_not_wait_for_one_that_is_left_out_and_has_not_come_back():
    """One newcomer hangs in a generation that failed to form: another newcomer joins without it."""
    story = Story("a:1", "b:1", min=1, cooldown=(50.0, 300.0)).run()
    story.add("c:1").answer(lambda e: not isinstance(e, ev.WorkerFormed))
    story.hang("c/0#1").quiet(60.2)
    assert wid("c/0#1") in story.cluster.held_back.keys() - story.cluster.newcomers
    story.add("d:1").quiet(2.0)
    assert story.names == ["a/0#1", "b/0#1", "d/0#1"]


@pytest.mark.parametrize("stage", [Stage.PREPARING, Stage.ASKED, Stage.LEAVING])
def test_members_stay_that_were_above_max_for_a_moment_only(stage):
    """max is lowered and raised again before they have left: no worker ends, and no other one is started. Removed hosts leave."""
    story = Story("a:2", "b:2", "c:1", min=1, cooldown=(0.0, 0.0)).run().commit(3).answer()
    story.scale(1, 2)
    if stage is not Stage.PREPARING:
        story.hear(ev.WorkerPrepared)
    if stage is Stage.LEAVING:
        story.hear(ev.LeaveAcknowledged)
    assert story.cluster.stage is stage
    story.remove("c").scale(1, 4).quiet(10.0)
    assert {str(command.worker) for command in story.commands(cmd.StopWorker)} == {"c/0#1"}
    assert [name.partition("#")[0] for name in story.names] == ["a/0", "a/1", "b/0", "b/1"]
