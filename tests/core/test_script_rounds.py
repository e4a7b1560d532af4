"""Scripts: who is in the next round, when all begin again, and what counts. The scenarios of torch's elastic agents."""

from __future__ import annotations

import pytest

from nbelastic.core import script_commands as scmd
from nbelastic.core.script_group import GroupState, Stage, first_failure, ranks_by_node
from nbelastic.core.script_rounds import advance, deadline
from nbelastic.protocol import script_events as sev
from tests.core.play import Play


def test_hosts_that_are_there_make_a_round():
    """Every host gets a worker a slot; the first one's store is the round's; nothing has been restarted."""
    play = Play("a:2", "b:1")
    form = [command for command in play.said if isinstance(command, scmd.FormRound)]
    assert len(form) == 1
    assert (form[0].round, form[0].store, form[0].restarts) == (1, "a:4000", 0)
    assert play.assignments == [("a", 2), ("b", 1)]
    assert play.group.nodes["a"].state is GroupState.HEALTHY


def test_ranks_count_through_hosts_and_roles():
    """As torch's agents assign them: global ranks by node, role ranks within each role, with unequal hosts."""
    assignments = (
        sev.Assignment("a", 2, "trainer"),
        sev.Assignment("b", 1, "reader"),
        sev.Assignment("c", 3, "trainer"),
    )
    assert ranks_by_node(assignments) == ((0, 6, 0, 5), (2, 6, 0, 1), (3, 6, 2, 5))


def test_too_few_wait_and_say_so():
    """A round needs `min` workers; after `elastic_timeout` seconds without them the job fails, with the reason."""
    play = Play("a:1", min=2, elastic_timeout=60)
    assert play.why == "1 of min 2 workers ready; add a host or lower min"
    play.wait(59)
    assert play.group.stage is Stage.GATHERING
    play.wait(2)
    assert play.end.outcome == "failed"
    assert "(elastic_timeout)" in play.end.reason


def test_the_last_call():
    """Enough nodes wait for those that are starting, but no longer than the settle time."""
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
    """The workers leave their round when it is ready, and not before; old hosts keep low ranks."""
    play = Play("a:2", settle=1.0)
    play.mute = {"b"}
    play.look("a:2", "b:2")
    assert play.group.stage is Stage.RUNNING
    assert play.group.round == 1
    play.ready("b")
    assert play.assignments == [("a", 2), ("b", 2)]
    assert (play.group.round, play.group.restarts) == (2, 0)


def test_survivors_keep_the_low_ranks_whatever_hosts_are_called():
    """Seats go by seniority, not by name: a newcomer takes no rank from a survivor, and `max` keeps it out first."""
    play = Play("b:1", "c:1").look("b:1", "c:1", "a:1")
    assert play.assignments == [("b", 1), ("c", 1), ("a", 1)]
    play.look("c:1", "a:1").look("c:1", "a:1", "b:1")
    assert play.assignments == [("c", 1), ("a", 1), ("b", 1)], "a host that comes back is a newcomer"
    play.allow(1, 2)
    assert play.look().assignments == [("c", 1), ("a", 1)]


def test_hosts_that_come_together_are_seated_in_the_order_in_which_they_came():
    """The first round of three new hosts follows the order in which the cluster got them."""
    play = Play("b:2", "a:1", "c:1")
    assert play.assignments == [("b", 2), ("a", 1), ("c", 1)]
    assert play.commands(scmd.FormRound)[0].store == "b:4000"


def test_a_running_round_waits_for_all_that_are_starting():
    """Two hosts come, one is ready: the round is not left before the other was ready, or had the settle time."""
    play = Play("b:1", settle=1.0)
    play.mute = {"a", "c"}
    play.look("b:1", "a:1", "c:1").ready("c")
    assert (play.group.stage, play.group.round) == (Stage.RUNNING, 1)
    assert play.why == "1 worker on 1 node in round 1; waiting for a"
    play.wait(0.9)
    assert play.group.round == 1
    play.ready("a")
    assert (play.group.round, play.assignments) == (2, [("b", 1), ("a", 1), ("c", 1)])


def test_a_running_round_does_not_wait_for_ever():
    """One of two new hosts never gets ready: after the settle time the other joins without it."""
    play = Play("b:1", settle=1.0)
    play.mute = {"a"}
    play.look("b:1", "a:1", "c:1").wait(1.1)
    assert (play.group.round, play.assignments) == (2, [("b", 1), ("c", 1)])


def test_a_running_round_that_will_be_full_waits_for_nobody():
    """With the newcomer that is ready the group has `max` workers: one that is still starting could not come in."""
    play = Play("b:1", max=2)
    play.mute = {"a"}
    play.look("b:1", "a:1", "c:1")
    assert play.assignments == [("b", 1), ("c", 1)]


def test_a_lost_host_restarts_the_others_at_once():
    """torchrun's other agents would go on waiting for it; here they are told, and it does not count."""
    play = Play("a:2", "b:2", "c:2")
    play.lost = ("b",)
    play.look("a:2", "c:2")
    assert play.assignments == [("a", 2), ("c", 2)]
    assert (play.group.round, play.group.restarts) == (2, 0)
    assert play.records("world-broken") == ["host b was lost"]


def test_a_removed_host_is_no_failure():
    """Somebody wanted that: the others begin again, and nothing is broken. So it is with a terminal that is ended."""
    play = Play("a:1", "b:1").external("t", 1)
    assert play.assignments == [("a", 1), ("b", 1), ("t", 1)]
    play.look("a:1")
    play.send(sev.NodeLeft("t", "it was ended by SIGINT"))
    assert play.assignments == [("a", 1)]
    assert play.records("change-planned")[-2:] == ["host b leaves", "t: it was ended by SIGINT"]
    assert not play.records("world-broken")
    play.external("t", 1).send(sev.NodeLeft("t", "no message from it for 10 s", broken=True))
    assert play.records("world-broken") == ["t: no message from it for 10 s"]


def test_what_a_node_has_offered_where_it_no_longer_is():
    """Its host has moved to another address: no round is formed with that store, but with the next one that it offers."""
    play = Play("a:1", min=2)
    play.send(sev.NodeMoved("a")).external("t", 1)
    assert play.assignments == []
    play.send(sev.NodeReady("a", 0, "elsewhere:1", "default"))
    assert play.assignments == [("a", 1), ("t", 1)]
    assert [command.store for command in play.said if isinstance(command, scmd.FormRound)] == ["elsewhere:1"]


def test_a_node_whose_workers_failed_and_that_has_moved_is_not_waited_for_without_end():
    """It offered a store, and then its host moved: past `leave` seconds without another offer it is ended."""
    play = Play("b:1", "a:1", "c:1", min=2)
    play.slow, play.lost = True, ("c",)
    play.look("b:1", "a:1", "d:1").send(sev.NodeFailed("b", 1))
    play.ready("b").ready("a").send(sev.NodeMoved("b"))
    assert play.group.stage is Stage.GATHERING
    play.wait(35.1)
    assert play.commands(scmd.EndNode)[-1].host == "b"


def test_the_host_of_rank_0_is_lost():
    """The next one leads: no host is special."""
    play = Play("a:2", "b:2").look("b:2")
    assert play.assignments == [("b", 2)]


def test_a_host_leaves_and_returns():
    """Torch's scenario of two agents: one leaves, the other goes on alone; it comes back, and both train."""
    play = Play("a:1", "b:1").look("a:1").look("a:1", "b:1")
    assert play.assignments == [("a", 1), ("b", 1)]
    assert play.group.round == 3
    assert play.group.restarts == 0


def test_below_min_the_survivors_wait():
    """And go on when there are enough again."""
    play = Play("a:2", "b:2", min=4).look("a:2")
    assert play.group.stage is Stage.GATHERING
    play.look("a:2", "b:2")
    assert play.assignments == [("a", 2), ("b", 2)]


def test_a_failed_worker_restarts_the_whole_group():
    """On all hosts, counted once, though the others' collectives broke too."""
    play = Play("a:2", "b:2", max_restarts=1)
    play.send(sev.NodeFailed("a", 1, (sev.Failure(0, 0, 1, "boom", ago=0.1),)))
    assert play.group.stage is Stage.RUNNING
    play.ready("a").fail("b", rank=2, ago=0.0, error="connection reset")
    assert (play.group.round, play.group.restarts) == (2, 1)


def test_a_signal_explains_itself():
    """No word of the others is waited for."""
    play = Play("a:2", "b:2", max_restarts=1)
    play.fail("a", code=-9)
    assert (play.group.round, play.group.restarts) == (2, 1)


def test_when_no_restarts_are_left_the_first_failure_is_the_job_s():
    """Sad and flaky workers: the error of the first that failed, with its rank, its host and its traceback."""
    play = Play("a:1", "b:1", max_restarts=1).fail("a", code=-9)
    play.send(sev.NodeFailed("b", 2, (sev.Failure(1, 0, 1, "connection reset", "late", 0.1),)))
    play.wait(0.05).send(sev.NodeFailed("a", 2, (sev.Failure(0, 0, 1, "KeyError: 'x'", "Traceback …", 0.2),)))
    assert play.end.outcome == "failed"
    assert play.end.reason == "rank 0 on a failed: KeyError: 'x' after 1 restarts"
    assert (play.end.host, play.end.failure.traceback) == ("a", "Traceback …")


@pytest.mark.parametrize(
    ("codes", "first"),
    [((1, -9), 1), ((-15, 1), 1), ((1, 1), 0), ((-15, -11), 1)],
    ids=["a signal before an exception", "ended by its node", "by time", "a crash"],
)
def test_which_failure_was_the_first(codes, first):
    """A killed worker leaves no time of its own, and the others' broken connections may be noted before it is seen."""
    failures = [("h", sev.Failure(rank, rank, code, ""), float(rank)) for rank, code in enumerate(codes)]
    assert first_failure(failures)[1].rank == first


def test_times_of_failures_are_of_the_driver_s_clock():
    """The host whose failure is reported later, and is younger, is not blamed, whatever its own clock says."""
    play = Play("a:1", "b:1", elastic_timeout=10.0)
    play.send(sev.NodeFailed("b", 1, (sev.Failure(1, 0, 1, "KeyError: 'x'", ago=0.3),)))
    play.wait(0.2).send(sev.NodeFailed("a", 1, (sev.Failure(0, 0, 1, "connection reset", ago=0.3),)))
    assert play.end.reason == "rank 1 on b failed: KeyError: 'x'"


def test_an_exception_that_a_lost_host_explains_is_no_failure():
    """Collectives break before the news of the host's end comes: `max_restarts=0` survives it."""
    play = Play("a:1", "b:1", grace=1.0)
    play.fail("a", error="connection reset")
    assert "waiting for the other nodes" in play.why
    play.look("a:1")
    assert play.assignments == [("a", 1)]
    assert play.group.restarts == 0


def test_an_exception_that_nothing_explains_is_judged_after_the_grace():
    """The other host's workers hang: its node never speaks of this failure."""
    play = Play("a:1", "b:1", max_restarts=1, grace=1.0).fail("a")
    play.wait(0.9)
    assert play.group.round == 1
    play.wait(0.2)
    assert (play.group.round, play.group.restarts) == (2, 1)


def test_news_of_an_old_round_are_dropped():
    """A failure and a success that were said too late change nothing."""
    play = Play("a:1", "b:1").look("a:1")
    before = play.group
    play.send(sev.NodeFailed("a", 1)).send(sev.NodeSucceeded("a", 1)).send(sev.NodeStarted("a", 1, (7,)))
    assert play.group == before


def test_a_late_word_of_a_host_that_is_gone_is_dropped():
    """Its workers had started when the host was lost: while the others wait for more, that word changes nothing."""
    play = Play("b:1", "a:1", min=2)
    play.lost = ("a",)
    play.look("b:1")
    assert play.group.stage is Stage.GATHERING
    before = play.group
    for late in (sev.NodeStarted("a", 1, (7,)), sev.NodeFailed("a", 1), sev.NodeSucceeded("a", 1), sev.NodeMoved("a")):
        assert play.send(late).group == before


def test_a_failure_is_counted_once_though_it_is_said_twice():
    """A link may deliver a word again: the second one adds nothing to what is judged."""
    play = Play("b:1", "a:1", max_restarts=1)
    failed = sev.NodeFailed("a", 1, (sev.Failure(1, 0, 1, "boom", ago=1.0),))
    play.send(failed).send(failed)
    assert len(play.group.failures) == 1
    play.wait(1.1)
    assert (play.group.round, play.group.restarts) == (2, 1)


def test_a_host_that_leaves_after_its_workers_have_ended_well_is_told_once():
    """Its part is done: it stays known, and nothing is sent to it each time that hosts are looked at."""
    play = Play("b:1", "a:1").succeed("a")
    play.look("b:1").look("b:1", "c:1").look("b:1")
    assert [command.host for command in play.commands(scmd.EndNode)] == ["c"]
    play.succeed("b")
    assert play.end.reason == "every worker ended well"


def test_max_is_kept():
    """Hosts come in by seniority; of the last one only some slots are used; a guest comes whole or waits."""
    play = Play("a:2", "b:2", max=3)
    assert play.assignments == [("a", 2), ("b", 1)]
    play.external("g", 1)
    assert play.assignments == [("a", 2), ("b", 1)]
    play.look("a:2")
    assert play.assignments == [("a", 2), ("g", 1)]


def test_scaling_up_and_down():
    """New bounds restart the group if they change who is in."""
    play = Play("a:2", "b:2")
    play.allow(1, 2)
    play.look()
    assert play.assignments == [("a", 2)]
    play.allow(1, None)
    play.look()
    assert play.assignments == [("a", 2), ("b", 2)]
    assert play.group.restarts == 0


def test_slots_that_change():
    """The host's node runs as many workers as there are slots now; `nproc` is what was asked for."""
    assert Play("a:1").look("a:3").assignments == [("a", 3)]
    assert Play("a:1", nproc=2).look("a:3").assignments == [("a", 2)]


def test_a_host_beyond_max_disturbs_nobody():
    """Nor does its going."""
    play = Play("a:2", max=2).look("a:2", "b:2").look("a:2")
    assert play.group.round == 1


def test_all_succeed():
    """The job ends when every node's workers have ended well."""
    play = Play("a:1", "b:1").succeed("a")
    assert play.group.stage is Stage.RUNNING
    play.succeed("b")
    assert play.end.outcome == "succeeded"


def test_who_comes_when_some_have_finished_disturbs_nobody():
    """And a host that is lost then restarts nothing: who finished keeps what it has."""
    play = Play("a:1", "b:1").succeed("a").look("a:1", "b:1", "c:1")
    assert play.group.round == 1
    play.look("a:1", "c:1")
    assert play.end.outcome == "succeeded"
    assert play.end.reason == "every worker ended well, but b did not"


def test_a_failure_after_some_have_finished_fails_the_job():
    """Those who finished are gone: a round without them would be another training."""
    play = Play("a:1", "b:1", max_restarts=5).succeed("a")
    play.fail("b").wait(2)
    assert play.end.outcome == "failed"
    assert {name: node.state.value for name, node in play.group.nodes.items()} == {"a": "SUCCEEDED", "b": "FAILED"}


def test_a_node_that_dies_is_started_again():
    """Its host is still there. After three times in vain the job fails, and says why."""
    play = Play("a:1", "b:1")
    play.send(sev.NodeLeft("b", "its node ended (SIGKILL)", broken=True))
    assert play.assignments == [("a", 1), ("b", 1)]
    assert (play.group.round, play.group.restarts) == (2, 0)
    play.mute = {"b"}
    for _ in range(4):  # the first one had worked
        play.send(sev.NodeLeft("b", "its node ended (exit code 1)", broken=True)).wait(3)
    assert play.end.reason == "the elastic agent on b has ended 3 times in a row: its node ended (exit code 1)"


def test_guests_join_and_leave():
    """Two terminals and a host of ours train together; one that ends is no failure."""
    play = Play("a:1").external("t1", 2).external("t2", 1)
    assert play.assignments == [("a", 1), ("t1", 2), ("t2", 1)]
    play.send(sev.NodeLeft("t1", "its process has ended"))
    assert play.assignments == [("a", 1), ("t2", 1)]
    assert play.group.restarts == 0


def test_a_guest_for_another_job_is_not_taken():
    """`--rdzv-id` names the job."""
    assert Play("a:1").external("t", 1, job="job-7").assignments == [("a", 1)]


def test_a_guest_that_comes_back_unasked_has_failed():
    """torch's own agent does not say so: it just asks for another round."""
    play = Play("a:1", max_restarts=3).external("t", 1).external("t", 1)
    play.wait(1.1)
    assert play.group.restarts == 1


def test_a_node_that_does_not_end_its_workers_is_ended():
    """The others do not wait for it for ever."""
    play = Play("a:1", "b:1", leave=10.0)
    play.group, _ = advance(play.group, sev.HostsChanged((("a", 1), ("b", 1), ("c", 1)), play.limits), play.now)
    play.group, commands = advance(play.group, sev.NodeReady("c", 0, "c:1", "default"), play.now)
    assert any(isinstance(command, scmd.LeaveRound) for command in commands)
    play.ready("a").wait(11)
    ended = [command.host for command in play.said if isinstance(command, scmd.EndNode)]
    assert ended == ["b"]


def test_who_is_late_is_waited_for_before_too_few_are_given_up():
    """A node has to offer another store, and is mute, while `elastic_timeout` passes: the group waits for its own deadline."""
    play = Play("a:1", "b:1", min=2, elastic_timeout=10.0, leave=30.0, max_restarts=1).fail("a")
    play.look("a:1").wait(1.0)
    play.mute, play.slow = {"a"}, True
    play.send(sev.NodeMoved("a"))
    play.wait(20.0)
    assert play.group.stage is Stage.GATHERING
    assert deadline(play.group) > play.now


@pytest.mark.parametrize("external", [False, True])
def test_a_node_whose_end_is_never_reported_is_left_behind(external):
    """It was told to end, and nobody says that it has: the others begin again without it, and one of ours is started anew."""
    play = Play("a:1", leave=10.0, max_restarts=1)
    play.external("b", 1) if external else play.look("a:1", "b:1")
    number, play.slow, play.mute = play.group.round, True, {"b"}
    play.send(sev.NodeFailed("a", number, (sev.Failure(0, 0, -9, "killed"),)))
    play.answers = [answer for answer in play.answers if answer.host == "a"]
    play.send(play.answers.pop()).wait(60.0)
    assert (play.group.stage, play.group.round, play.assignments) == (Stage.RUNNING, number + 1, [("a", 1)])
    assert [command.host for command in play.commands(scmd.StartNode)] == ["a"] + ["b", "b"] * (not external)


def test_a_stop_ends_every_node():
    """With the reason."""
    play = Play("a:1", "b:1").send(sev.ScriptStopped("stopped by you"))
    assert (play.end.outcome, play.end.reason) == ("stopped", "stopped by you")
    assert {command.host for command in play.said if isinstance(command, scmd.EndNode)} == {"a", "b"}
    assert play.why == "stopped by you"
