"""What an agent does for its workers, without a process: orders, ends, states and time go in, actions come out."""

from __future__ import annotations

import pytest

from nbelastic.agent.protocol import BLOCKED, GRACE, LAST, ORPHANED, End, Fork, Introduce, Protocol, Say, Signal
from nbelastic.protocol import agent_messages, messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId

W, NEXT = WorkerId("a", 0, 1), WorkerId("a", 0, 2)


def with_worker():
    """An agent with a worker of pid 7."""
    agent = Protocol(30.0)
    order = agent_messages.Spawn(W, "/logs", "{}")
    assert agent.heard(order, 0.0) == [Fork(order)]
    assert agent.forked(W, 7) == [Say(ev.WorkerStarted(W, 7))]
    return agent


def test_a_worker_lives_and_ends():
    """The driver hears of both; what the worker had started is ended with it."""
    agent = with_worker()
    assert (agent.workers, agent.newest) == (((W, 7),), {0: 1})
    assert agent.exited(W, -9) == [Say(ev.WorkerExited(W, -9)), Signal(W, kill=True)]
    assert (agent.workers, agent.newest) == ((), {0: 1}), "no later one gets its number"


def test_one_that_dies_at_once_is_reported():
    """Its process had ended before it was known."""
    agent = Protocol(30.0)
    agent.heard(agent_messages.Spawn(W, "/logs", "{}"), 0.0)
    assert agent.exited(W, 1) == [Say(ev.WorkerExited(W, 1))]


def test_one_that_is_told_to_end_is_killed_if_it_does_not():
    """After a grace, and at each look from then on: one that was just forked leads no group yet."""
    agent = with_worker()
    assert agent.heard(agent_messages.StopWorker(W, kill=False), 10.0) == [Signal(W, kill=False)]
    assert agent.looked({W: "S"}, 10.0 + GRACE / 2) == []
    for at in (10.0 + GRACE, 10.1 + GRACE):
        assert agent.looked({W: "S"}, at) == [Signal(W, kill=True)]


def test_one_that_is_to_be_killed_is_killed_until_it_is_gone():
    """At once, and at each look."""
    agent = with_worker()
    assert agent.heard(agent_messages.StopWorker(W, kill=True), 10.0) == [Signal(W, kill=True)]
    assert agent.looked({W: "R"}, 10.0) == [Signal(W, kill=True)]


def test_an_order_to_end_one_that_is_gone_is_answered():
    """The driver may not have heard of its end."""
    assert Protocol(30.0).heard(agent_messages.StopWorker(W, kill=True), 0.0) == [Say(ev.WorkerExited(W, 0))]


@pytest.mark.parametrize(("state", "said"), [("T", "stopped"), ("t", "traced")])
def test_a_stopped_process_is_reported_once(state, said):
    """When two looks in a row have found it so; again if it was stopped anew, and to a new driver."""
    agent = with_worker()
    assert agent.looked({W: state}, 1.0) == []
    assert agent.looked({W: state}, 1.1) == [Say(ev.WorkerFrozen(W, said))]
    assert agent.looked({W: state}, 1.2) == []
    assert agent.looked({W: "S"}, 1.3) == agent.looked({W: state}, 1.4) == []
    assert agent.looked({W: state}, 1.5) == [Say(ev.WorkerFrozen(W, said))]
    assert agent.heard(messages.Welcome(2), 1.6) == [Introduce()]
    assert [agent.looked({W: state}, at) for at in (1.7, 1.8)] == [[], [Say(ev.WorkerFrozen(W, said))]]


def test_a_process_in_uninterruptible_sleep_is_reported_after_a_while():
    """Since when, and no longer than it is."""
    agent = with_worker()
    agent.looked({W: "D"}, 1.0)
    agent.looked({W: "D"}, 1.5)
    assert agent.blocked(0.9 + BLOCKED) == {}
    assert agent.blocked(1.0 + BLOCKED) == {str(W): BLOCKED}
    agent.looked({W: "S"}, 2.5)
    assert agent.blocked(9.0) == {}


def test_an_older_driver_is_not_answered():
    """What it has sent comes late: another has taken over since."""
    agent = Protocol(30.0)
    assert agent.heard(messages.Welcome(3), 0.0) == [Introduce()]
    assert agent.heard(messages.Welcome(2), 0.1) == []
    assert agent.heard(messages.Welcome(3), 0.2) == [Introduce()], "it asks again: it has not heard the answer"


def test_the_newest_of_a_slot_is_remembered():
    """Orders may come in any order; no number is used twice."""
    agent = with_worker()
    agent.heard(agent_messages.Spawn(NEXT, "/logs", "{}"), 0.0)
    agent.heard(agent_messages.Spawn(W, "/logs", "{}"), 0.0)
    assert agent.newest == {0: 2}


def test_it_ends_when_it_is_told_to():
    """With all its workers, which its process sees to."""
    assert with_worker().heard(agent_messages.StopAgent(), 0.0) == [End()]


def test_the_lease():
    """Without a driver it ends; workers, which may write a last checkpoint, have a minute more for that."""
    agent = with_worker()
    assert not agent.forsaken(heard_at=10.0, now=40.0 + LAST)
    assert agent.forsaken(heard_at=10.0, now=40.1 + LAST)
    agent.exited(W, 0)
    assert not agent.forsaken(heard_at=10.0, now=40.0)
    assert agent.forsaken(heard_at=10.0, now=40.1)


def test_the_cluster_has_ended():
    """An agent that no driver knows has no workers; those that there are may write a last checkpoint, as at the lease's end."""
    agent = with_worker()
    agent.over = True
    assert not agent.forsaken(heard_at=10.0, now=40.0 + LAST)
    agent.exited(W, 0)
    assert agent.forsaken(heard_at=10.0, now=10.0)


def test_the_kernel_that_owns_it_has_ended():
    """The driver ends everything; without one the agent does so itself, soon."""
    agent = with_worker()
    agent.orphaned(20.0)
    agent.orphaned(21.0)
    assert not agent.forsaken(heard_at=10.0, now=20.0 + ORPHANED), "the driver may be about to hear of it"
    assert agent.forsaken(heard_at=10.0, now=20.1 + ORPHANED)
    assert not agent.forsaken(heard_at=25.0, now=25.0 + ORPHANED)
