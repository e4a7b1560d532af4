"""Workers and nodes of a script fail: which failures count, and which one ends the job."""

from __future__ import annotations

import pytest

from nbelastic.core.script_group import Stage, first_failure
from nbelastic.protocol import script_events as sev
from tests.core.play import Play


def test_a_failed_worker_restarts_the_whole_group():
    """A failed worker restarts the group on all hosts, counted once."""
    play = Play("a:2", "b:2", max_restarts=1)
    play.send(sev.NodeFailed("a", 1, (sev.Failure(0, 0, 1, "boom", ago=0.1),)))
    assert play.group.stage is Stage.RUNNING
    play.ready("a").fail("b", rank=2, ago=0.0, error="connection reset")
    assert (play.group.round, play.group.restarts) == (2, 1)


def test_a_failure_by_signal_is_judged_at_once():
    """A worker that a signal ended is judged without waiting for the other nodes."""
    play = Play("a:2", "b:2", max_restarts=1)
    play.fail("a", code=-9)
    assert (play.group.round, play.group.restarts) == (2, 1)


def test_when_no_restarts_are_left_the_first_failure_is_the_job_s():
    """The job fails with the error of the worker that failed first: rank, host and traceback."""
    play = Play("a:1", "b:1", max_restarts=1).fail("a", code=-9)
    play.send(sev.NodeFailed("b", 2, (sev.Failure(1, 0, 1, "connection reset", "late", 0.1),)))
    play.wait(0.05).send(sev.NodeFailed("a", 2, (sev.Failure(0, 0, 1, "KeyError: 'x'", "Traceback …", 0.2),)))
    assert play.end.outcome == "failed"
    assert play.end.reason == "rank 0 on a failed: KeyError: 'x' after 1 restarts"
    assert (play.end.host, play.end.failure.traceback) == ("a", "Traceback …")


@pytest.mark.parametrize(
    ("codes", "first"),
    [((1, -9), 1), ((-15, 1), 1), ((1, 1), 0), ((-15, -11), 1), ((-6, -9), 1), ((1, -6), 0)],
    ids=["a signal before an exception", "ended by its node", "by time", "a crash", "an abort", "an abort by time"],
)
def test_a_killed_worker_is_the_first_failure(codes, first):
    """A killed worker counts as the first failure, although it reports no time of its own."""
    failures = [("h", sev.Failure(rank, rank, code, ""), float(rank)) for rank, code in enumerate(codes)]
    assert first_failure(failures)[1].rank == first


def test_times_of_failures_are_of_the_driver_s_clock():
    """The first failure is found by the driver's clock, whatever the hosts' clocks show."""
    play = Play("a:1", "b:1", elastic_timeout=10.0)
    play.send(sev.NodeFailed("b", 1, (sev.Failure(1, 0, 1, "KeyError: 'x'", ago=0.3),)))
    play.wait(0.2).send(sev.NodeFailed("a", 1, (sev.Failure(0, 0, 1, "connection reset", ago=0.3),)))
    assert play.end.reason == "rank 1 on b failed: KeyError: 'x'"


def test_an_exception_that_a_lost_host_explains_is_not_a_failure():
    """Collectives fail before the loss of a host is known: `max_restarts=0` survives it."""
    play = Play("a:1", "b:1", grace=1.0)
    play.fail("a", error="connection reset")
    assert "waiting for the other nodes" in play.why
    play.look("a:1")
    assert play.assignments == [("a", 1)]
    assert play.group.restarts == 0


def test_an_abort_that_a_lost_host_explains_is_not_a_failure():
    """C++ code aborts a process (SIGABRT) after a broken collective, and the loss is known later: `max_restarts` keeps its count."""
    play = Play("a:1", "b:1", max_restarts=1, grace=1.0)
    play.fail("a", code=-6)
    assert "waiting for the other nodes" in play.why
    play.look("a:1")
    assert (play.assignments, play.group.restarts) == ([("a", 1)], 0)


def test_an_unexplained_exception_is_judged_after_the_grace_time():
    """The other node lives and never reports a failure: the exception is judged after the grace time."""
    play = Play("a:1", "b:1", max_restarts=1, grace=1.0).fail("a")
    play.wait(0.9)
    assert play.group.round == 1
    play.wait(0.2)
    assert (play.group.round, play.group.restarts) == (2, 1)


def test_a_node_that_is_not_heard_after_a_failure_may_be_its_cause():
    """All processes of its machine are dead. The loss of its host is known only after a silence, and explains the failure."""
    play = Play("a:1", "b:1", grace=1.0)
    play.silent = {"b"}
    play.fail("a", error="connection reset").wait(9.0)
    assert "waiting for the other nodes" in play.why
    play.look("a:1")
    assert (play.assignments, play.group.restarts) == ([("a", 1)], 0)


def test_a_failure_is_judged_at_last_though_a_node_is_neither_heard_nor_lost():
    """The wait has an end."""
    play = Play("a:1", "b:1", max_restarts=1)
    play.silent = {"b"}
    play.fail("a", ago=0.0).wait(59.0)
    assert play.group.restarts == 0
    play.wait(2.0)
    assert play.group.restarts == 1


def test_messages_of_an_old_round_are_dropped():
    """A failure or success of an earlier round changes nothing."""
    play = Play("a:1", "b:1").look("a:1")
    before = play.group
    play.send(sev.NodeFailed("a", 1)).send(sev.NodeSucceeded("a", 1)).send(sev.NodeStarted("a", 1, (7,)))
    assert play.group == before


def test_a_late_message_of_a_lost_host_is_dropped():
    """A late message of a lost host's node changes nothing while the others wait."""
    play = Play("b:1", "a:1", min=2)
    play.lost = ("a",)
    play.look("b:1")
    assert play.group.stage is Stage.GATHERING
    before = play.group
    for late in (sev.NodeStarted("a", 1, (7,)), sev.NodeFailed("a", 1), sev.NodeSucceeded("a", 1), sev.NodeMoved("a")):
        assert play.send(late).group == before


def test_a_repeated_report_of_a_failure_counts_once():
    """A repeated report of a failure adds nothing."""
    play = Play("b:1", "a:1", max_restarts=1)
    failed = sev.NodeFailed("a", 1, (sev.Failure(1, 0, 1, "boom", ago=1.0),))
    play.send(failed).send(failed)
    assert len(play.group.failures) == 1
    play.wait(1.1)
    assert (play.group.round, play.group.restarts) == (2, 1)


def test_a_failure_after_some_have_finished_fails_the_job():
    """A failure after a node has succeeded fails the job, as no whole round can form."""
    play = Play("a:1", "b:1", max_restarts=5).succeed("a")
    play.fail("b").wait(2)
    assert play.end.outcome == "failed"
    assert {name: node.state.value for name, node in play.group.nodes.items()} == {"a": "SUCCEEDED", "b": "FAILED"}


def test_a_node_that_dies_is_started_again():
    """A node that ends on a host that is up is started again; after three such ends the job fails if it needs that host."""
    play = Play("a:1", "b:1", min=2, cooldown=(0.0, 0.0))
    play.send(sev.NodeLeft("b", "its node ended (SIGKILL)", broken=True))
    assert play.assignments == [("a", 1), ("b", 1)]
    assert (play.group.round, play.group.restarts) == (2, 0)
    play.mute = {"b"}
    for _ in range(4):  # the first one had worked
        play.send(sev.NodeLeft("b", "its node ended (exit code 1)", broken=True)).wait(3)
    assert play.end.reason == "the elastic agent on b has ended 3 times in a row: its node ended (exit code 1)"


def test_a_host_that_cannot_run_the_script_does_not_end_it_for_the_others():
    """The node of a new host ends again and again: the others train on, it is named, and tried again after a back-off."""
    play = Play("a:1", "b:1", cooldown=(5.0, 40.0))
    play.mute = {"c"}
    play.look("a:1", "b:1", "c:1")
    pauses = []
    for _ in range(7):
        play.send(sev.NodeLeft("c", "its node ended (exit code 1)", broken=True))
        pauses.append(play.group.nodes["c"].retry_at - play.now)
        play.wait(pauses[-1])
    assert pauses == [0.5, 1.0, 5.0, 10.0, 20.0, 40.0, 40.0]
    assert (play.group.round, play.assignments) == (1, [("a", 1), ("b", 1)])
    assert play.records("worker-failed")[0] == (
        "the elastic agent on c has ended 3 times in a row: its node ended (exit code 1); tried again in 5 s"
    )
    play.mute = set()
    play.send(sev.NodeLeft("c", "its node ended (exit code 1)", broken=True)).wait(50)
    assert play.assignments == [("a", 1), ("b", 1), ("c", 1)]


def test_a_host_that_cannot_run_the_script_does_not_end_it_while_another_one_is_lost():
    """The others have trained without it: they wait for the lost host, up to `elastic_timeout`."""
    play = Play("a:1", "b:1", min=2, cooldown=(5.0, 40.0), elastic_timeout=600.0)
    play.mute = {"c"}
    play.look("a:1", "b:1", "c:1")
    for _ in range(4):
        play.send(sev.NodeLeft("c", "its node ended (exit code 1)", broken=True))
        play.wait(play.group.nodes["c"].retry_at - play.now)
    play.lost = ("a",)
    play.look("b:1", "c:1").send(sev.NodeLeft("c", "its node ended (exit code 1)", broken=True))
    play.look("a:1", "b:1", "c:1").wait(1.0)
    assert (play.group.round, play.assignments) == (2, [("a", 1), ("b", 1)])
    play.look("b:1", "c:1").wait(600.0)
    assert play.end.reason.endswith("for 600 s (elastic_timeout)")


def test_a_node_that_dies_in_each_round_is_tried_again_after_a_back_off():
    """A host on which torch's agent is killed in each round: the others are not restarted with it without an end, and it is named."""
    play = Play("a:1", "b:1", cooldown=(5.0, 40.0))
    pauses = []
    for _ in range(6):
        assert play.assignments == [("a", 1), ("b", 1)]
        play.wait(1.0).send(sev.NodeLeft("b", "its node ended (SIGKILL)", broken=True))
        pauses.append(play.group.nodes["b"].retry_at - play.now if ("b", 1) not in play.assignments else 0.0)
        play.wait(pauses[-1] + 0.1)
    assert pauses == [0.0, 5.0, 10.0, 20.0, 40.0, 40.0]
    assert play.records("worker-failed")[0] == (
        "the elastic agent on b has ended 2 times soon after its start: its node ended (SIGKILL); tried again in 5 s"
    )
    play.wait(60.0).send(sev.NodeLeft("b", "its node ended (SIGKILL)", broken=True))
    assert play.assignments == [("a", 1), ("b", 1)], "it has lived long enough: it begins again at once"


def test_a_script_that_needs_a_node_in_back_off_says_so():
    """Too few workers are left: the reason names the node that is started again, and when."""
    play = Play("a:1", "b:1", min=2, cooldown=(5.0, 40.0))
    for _ in range(2):
        play.send(sev.NodeLeft("b", "its node ended (SIGKILL)", broken=True))
    assert play.why == "1 of min 2 workers ready; waiting for b (in back-off, 5 s more: its node ended (SIGKILL))"
