"""Rounds of scripts: which nodes are in the next one, and when all begin another, as torch's elastic agents do."""

from __future__ import annotations

import pytest

from nbelastic.core import script_commands as scmd
from nbelastic.core.script_group import GroupState, Stage, ranks_by_node
from nbelastic.core.script_rounds import advance, deadline
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.cluster_limits import NEVER
from tests.core.play import Play


def test_hosts_that_are_up_make_a_round():
    """Each host gets one worker per slot, the first node's store is the round's, and no restart is counted."""
    play = Play("a:2", "b:1")
    form = [command for command in play.said if isinstance(command, scmd.FormRound)]
    assert len(form) == 1
    assert (form[0].round, form[0].store, form[0].restarts) == (1, "a:4000", 0)
    assert play.assignments == [("a", 2), ("b", 1)]
    assert play.group.nodes["a"].state is GroupState.HEALTHY


def test_ranks_count_through_hosts_and_roles():
    """Ranks are as torch's agents assign them: global ranks by node, role ranks within each role."""
    assignments = (
        sev.Assignment("a", 2, "trainer"),
        sev.Assignment("b", 1, "reader"),
        sev.Assignment("c", 3, "trainer"),
    )
    assert ranks_by_node(assignments) == ((0, 6, 0, 5), (2, 6, 0, 1), (3, 6, 2, 5))


def test_too_few_workers_wait_with_a_reason():
    """A round needs `min` workers; after `elastic_timeout` seconds without them the job fails with a reason."""
    play = Play("a:1", min=2, elastic_timeout=60)
    assert play.why == "1 of min 2 workers ready; add a host or lower min"
    play.wait(59)
    assert play.group.stage is Stage.GATHERING
    play.wait(2)
    assert play.end.outcome == "failed"
    assert "(elastic_timeout)" in play.end.reason


@pytest.mark.parametrize("wait", ["to gather", "to leave"])
def test_no_wait_of_a_script_is_without_a_deadline(wait):
    """No node answers: each wait has a deadline, and after the last one the job has failed."""
    if wait == "to gather":
        play = Play(min=2, elastic_timeout=60)
        play.mute = {"a", "b"}
        play.look("a:1", "b:1")
    else:
        play = Play("a:1", "b:1", min=2, elastic_timeout=60)
        play.slow = True
        play.mute = {"a", "b"}
        play.send(sev.NodeFailed("a", play.group.round, (sev.Failure(0, 0, 1, "boom", "trace", 1.0),)))
    begun = play.now
    while play.group.stage is not Stage.ENDED:
        at = deadline(play.group)
        assert at != NEVER, play.why
        assert at < begun + 1000.0, play.why
        play.wait(at - play.now + 0.01)
    assert play.end.outcome == "failed"


def test_enough_nodes_wait_the_settle_time_for_others():
    """Enough nodes wait for starting ones, but no longer than the settle time."""
    play = Play("a", "b", settle=1.0)
    assert play.assignments == [("a", 1), ("b", 1)]
    late = Play.__new__(Play)
    Play.__init__(late, settle=1.0)
    late.mute = {"b"}
    late.look("a:1", "b:1")
    assert late.group.stage is Stage.GATHERING
    assert "waiting for b" in late.why
    late.wait(1.1)
    assert late.assignments == [("a", 1)]


def test_a_late_host_restarts_the_group_and_that_does_not_count():
    """Workers leave their round when a late host is ready; old hosts keep low ranks, and no restart is counted."""
    play = Play("a:2", settle=1.0)
    play.mute = {"b"}
    play.look("a:2", "b:2")
    assert play.group.stage is Stage.RUNNING
    assert play.group.round == 1
    play.ready("b")
    assert play.assignments == [("a", 2), ("b", 2)]
    assert (play.group.round, play.group.restarts) == (2, 0)


def test_survivors_keep_the_low_ranks_whatever_hosts_are_called():
    """Assignments go by seniority, not by name: a newcomer takes no survivor's rank, and `max` excludes it first."""
    play = Play("b:1", "c:1").look("b:1", "c:1", "a:1")
    assert play.assignments == [("b", 1), ("c", 1), ("a", 1)]
    play.look("c:1", "a:1").look("c:1", "a:1", "b:1")
    assert play.assignments == [("c", 1), ("a", 1), ("b", 1)], "a host that comes back is a newcomer"
    play.allow(1, 2)
    assert play.look().assignments == [("c", 1), ("a", 1)]


def test_a_minimum_that_all_nodes_do_not_reach_leaves_the_round_as_it_is():
    """`min` is raised above the workers of all nodes: the round goes on, as a larger one could not form."""
    play = Play("b:1", "a:1", min=1, max=1)
    assert play.assignments == [("b", 1)]
    play.allow(3, None)
    assert play.look().wait(60.0).assignments == [("b", 1)]
    play.allow(2, None)
    assert play.look().assignments == [("b", 1), ("a", 1)]


def test_hosts_that_come_together_are_ordered_as_they_came():
    """The first round orders new hosts as the cluster got them."""
    play = Play("b:2", "a:1", "c:1")
    assert play.assignments == [("b", 2), ("a", 1), ("c", 1)]
    assert play.commands(scmd.FormRound)[0].store == "b:4000"


def test_a_running_round_waits_for_all_that_are_starting():
    """A round is left when all starting hosts are ready, or after the settle time."""
    play = Play("b:1", settle=1.0)
    play.mute = {"a", "c"}
    play.look("b:1", "a:1", "c:1").ready("c")
    assert (play.group.stage, play.group.round) == (Stage.RUNNING, 1)
    assert play.why == "1 worker on 1 node in round 1; waiting for a"
    play.wait(0.9)
    assert play.group.round == 1
    play.ready("a")
    assert (play.group.round, play.assignments) == (2, [("b", 1), ("a", 1), ("c", 1)])


def test_a_running_round_waits_the_settle_time_at_most():
    """A new host never gets ready: after the settle time the ready one joins without it."""
    play = Play("b:1", settle=1.0)
    play.mute = {"a"}
    play.look("b:1", "a:1", "c:1").wait(1.1)
    assert (play.group.round, play.assignments) == (2, [("b", 1), ("c", 1)])


def test_a_running_round_that_will_be_full_does_not_wait():
    """A ready newcomer fills the group to `max`: a starting host is not awaited."""
    play = Play("b:1", max=2)
    play.mute = {"a"}
    play.look("b:1", "a:1", "c:1")
    assert play.assignments == [("b", 1), ("c", 1)]


def test_a_lost_host_restarts_the_others_at_once():
    """The nodes of other hosts are asked at once to leave the round, and no restart is counted."""
    play = Play("a:2", "b:2", "c:2")
    play.lost = ("b",)
    play.look("a:2", "c:2")
    assert play.assignments == [("a", 2), ("c", 2)]
    assert (play.group.round, play.group.restarts) == (2, 0)
    assert play.records("world-broken") == ["host b was lost"]


def test_a_removed_host_is_not_a_failure():
    """A removed host, or an ended external node, begins another round without a failure."""
    play = Play("a:1", "b:1").external("t", 1)
    assert play.assignments == [("a", 1), ("b", 1), ("t", 1)]
    play.look("a:1")
    play.send(sev.NodeLeft("t", "it was ended by SIGINT"))
    assert play.assignments == [("a", 1)]
    assert play.records("change-planned")[-2:] == ["host b leaves", "t: it was ended by SIGINT"]
    assert not play.records("world-broken")
    play.external("t", 1).send(sev.NodeLeft("t", "no message from it for 10 s", broken=True))
    assert play.records("world-broken") == ["t: no message from it for 10 s"]


def test_a_store_at_an_old_address_is_not_used():
    """After a host has moved, a round forms only with the store that its node offers next."""
    play = Play("a:1", min=2)
    play.send(sev.NodeMoved("a")).external("t", 1)
    assert play.assignments == []
    play.send(sev.NodeReady("a", 0, "elsewhere:1", "default"))
    assert play.assignments == [("a", 1), ("t", 1)]
    assert [command.store for command in play.said if isinstance(command, scmd.FormRound)] == ["elsewhere:1"]


def test_a_node_whose_workers_failed_and_that_has_moved_is_not_waited_for_without_end():
    """A node that moved and offers no store within `leave` seconds is ended."""
    play = Play("b:1", "a:1", "c:1", min=2)
    play.slow, play.lost = True, ("c",)
    play.look("b:1", "a:1", "d:1").send(sev.NodeFailed("b", 1))
    play.ready("b").ready("a").send(sev.NodeMoved("b"))
    assert play.group.stage is Stage.GATHERING
    play.wait(35.1)
    assert play.commands(scmd.EndNode)[-1].host == "b"


def test_the_host_of_rank_0_is_lost():
    """The next host's node becomes the first of the next round."""
    play = Play("a:2", "b:2").look("b:2")
    assert play.assignments == [("b", 2)]


def test_a_host_leaves_and_returns():
    """One of two hosts leaves, the other trains alone, and both train after its return."""
    play = Play("a:1", "b:1").look("a:1").look("a:1", "b:1")
    assert play.assignments == [("a", 1), ("b", 1)]
    assert play.group.round == 3
    assert play.group.restarts == 0


def test_below_min_the_survivors_wait():
    """Survivors below min wait, and go on when there are enough."""
    play = Play("a:2", "b:2", min=4).look("a:2")
    assert play.group.stage is Stage.GATHERING
    play.look("a:2", "b:2")
    assert play.assignments == [("a", 2), ("b", 2)]


def test_a_leaving_host_whose_workers_have_succeeded_is_asked_once():
    """A leaving host whose workers have succeeded is sent the request to leave once."""
    play = Play("b:1", "a:1").succeed("a")
    play.look("b:1").look("b:1", "c:1").look("b:1")
    assert [command.host for command in play.commands(scmd.EndNode)] == ["c"]
    play.succeed("b")
    assert play.end.reason == "every worker ended well"


def test_max_is_kept():
    """Hosts join by seniority; the last one may use some slots only; an external node joins whole or waits."""
    play = Play("a:2", "b:2", max=3)
    assert play.assignments == [("a", 2), ("b", 1)]
    play.external("g", 1)
    assert play.assignments == [("a", 2), ("b", 1)]
    play.look("a:2")
    assert play.assignments == [("a", 2), ("g", 1)]


def test_scaling_up_and_down():
    """New limits restart the group if they change its nodes."""
    play = Play("a:2", "b:2")
    play.allow(1, 2)
    play.look()
    assert play.assignments == [("a", 2)]
    play.allow(1, None)
    play.look()
    assert play.assignments == [("a", 2), ("b", 2)]
    assert play.group.restarts == 0


def test_slots_that_change():
    """A node runs as many workers as its host has slots now; `nproc` is the requested number."""
    assert Play("a:1").look("a:3").assignments == [("a", 3)]
    assert Play("a:1", nproc=2).look("a:3").assignments == [("a", 2)]


def test_a_host_beyond_max_begins_no_round():
    """A host beyond max comes and goes without another round."""
    play = Play("a:2", max=2).look("a:2", "b:2").look("a:2")
    assert play.group.round == 1


def test_all_succeed():
    """The job succeeds when every node's workers have succeeded."""
    play = Play("a:1", "b:1").succeed("a")
    assert play.group.stage is Stage.RUNNING
    play.succeed("b")
    assert play.end.outcome == "succeeded"


def test_newcomers_after_a_success_begin_no_round():
    """After a node has succeeded, newcomers and lost hosts begin no other round."""
    play = Play("a:1", "b:1").succeed("a").look("a:1", "b:1", "c:1")
    assert play.group.round == 1
    play.look("a:1", "c:1")
    assert play.end.outcome == "succeeded"
    assert play.end.reason == "every worker ended well, but b did not"


def test_external_nodes_join_and_leave():
    """Two external nodes and a host's node train together; an external node's end is not a failure."""
    play = Play("a:1").external("t1", 2).external("t2", 1)
    assert play.assignments == [("a", 1), ("t1", 2), ("t2", 1)]
    play.send(sev.NodeLeft("t1", "its process has ended"))
    assert play.assignments == [("a", 1), ("t2", 1)]
    assert play.group.restarts == 0


def test_an_external_node_for_another_job_is_not_taken():
    """`--rdzv-id` names the job that an external node waits for."""
    assert Play("a:1").external("t", 1, job="job-7").assignments == [("a", 1)]


def test_an_external_node_that_returns_unasked_has_failed():
    """An external node that asks for another round without being asked has failed."""
    play = Play("a:1", max_restarts=3).external("t", 1).external("t", 1)
    play.wait(1.1)
    assert play.group.restarts == 1


def test_a_node_that_does_not_end_its_workers_is_ended():
    """A node that does not end its workers in time is ended."""
    play = Play("a:1", "b:1", leave=10.0)
    play.group, _ = advance(play.group, sev.HostsChanged((("a", 1), ("b", 1), ("c", 1)), play.limits), play.now)
    play.group, commands = advance(play.group, sev.NodeReady("c", 0, "c:1", "default"), play.now)
    assert any(isinstance(command, scmd.LeaveRound) for command in commands)
    play.ready("a").wait(11)
    ended = [command.host for command in play.said if isinstance(command, scmd.EndNode)]
    assert ended == ["b"]


def test_a_node_has_its_own_deadline_beside_elastic_timeout():
    """A node has its own deadline for another store, although `elastic_timeout` passes before."""
    play = Play("a:1", "b:1", min=2, elastic_timeout=10.0, leave=30.0, max_restarts=1).fail("a")
    play.look("a:1").wait(1.0)
    play.mute, play.slow = {"a"}, True
    play.send(sev.NodeMoved("a"))
    play.wait(20.0)
    assert play.group.stage is Stage.GATHERING
    assert deadline(play.group) > play.now


@pytest.mark.parametrize("external", [False, True])
def test_a_node_whose_end_is_never_reported_is_left_behind(external):
    """The end of a node is never reported: the others begin without it, and a host's node is started again."""
    play = Play("a:1", leave=10.0, max_restarts=1)
    play.external("b", 1) if external else play.look("a:1", "b:1")
    number, play.slow, play.mute = play.group.round, True, {"b"}
    play.send(sev.NodeFailed("a", number, (sev.Failure(0, 0, -9, "killed"),)))
    play.answers = [answer for answer in play.answers if answer.host == "a"]
    play.send(play.answers.pop()).wait(60.0)
    assert (play.group.stage, play.group.round, play.assignments) == (Stage.RUNNING, number + 1, [("a", 1)])
    assert [command.host for command in play.commands(scmd.StartNode)] == ["a"] + ["b", "b"] * (not external)


def test_a_stop_ends_every_node():
    """A stop ends every node with the reason."""
    play = Play("a:1", "b:1").send(sev.ScriptStopped("stopped by you"))
    assert (play.end.outcome, play.end.reason) == ("stopped", "stopped by you")
    assert {command.host for command in play.said if isinstance(command, scmd.EndNode)} == {"a", "b"}
    assert play.why == "stopped by you"
