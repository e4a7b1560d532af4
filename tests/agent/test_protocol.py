"""Decisions of an agent, without processes: messages, exits, states and times go in, actions come out."""

from __future__ import annotations

import pytest

from nbelastic.agent.protocol import BLOCKED, KILL_AFTER, End, Fork, Harm, Protocol, Send, SendHello, Signal
from nbelastic.protocol import agent_messages, messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.chaos import STOPPED_FOR
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.timeouts import LAST_CHECKPOINT, OWNER_ENDED

W, NEXT = WorkerId("a", 0, 1), WorkerId("a", 0, 2)


def with_worker():
    """An agent with a worker of pid 7."""
    agent = Protocol("a", 30.0, 20.0)
    order = agent_messages.Spawn(W, "/logs")
    assert agent.handle(order, 0.0) == [Fork(order)]
    assert agent.forked(W, 7) == [Send(ev.WorkerStarted(W, 7))]
    return agent


def test_a_worker_starts_and_ends():
    """The driver receives a worker's start and end, and the worker's child processes are killed."""
    agent = with_worker()
    assert (agent.workers, agent.newest) == (((W, 7),), {0: 1})
    assert agent.exited(W, -9) == [Send(ev.WorkerExited(W, -9)), Signal(W, kill=True)]
    assert (agent.workers, agent.newest) == ((), {0: 1}), "no later worker gets its incarnation"


def test_a_worker_that_ends_at_once_is_reported():
    """A worker that ends before the agent knows its pid is reported."""
    agent = Protocol("a", 30.0, 20.0)
    agent.handle(agent_messages.Spawn(W, "/logs"), 0.0)
    assert agent.exited(W, 1) == [Send(ev.WorkerExited(W, 1))]


def test_a_worker_that_ignores_sigterm_is_killed():
    """A worker that ignores SIGTERM is killed after `KILL_AFTER`, at each check."""
    agent = with_worker()
    assert agent.handle(agent_messages.StopWorker(W, kill=False), 10.0) == [Signal(W, kill=False)]
    assert agent.check_states({W: "S"}, 10.0 + KILL_AFTER / 2) == []
    for at in (10.0 + KILL_AFTER, 10.1 + KILL_AFTER):
        assert agent.check_states({W: "S"}, at) == [Signal(W, kill=True)]


def test_a_worker_is_killed_until_it_has_ended():
    """A kill is sent at once, and at each check until the worker has ended."""
    agent = with_worker()
    assert agent.handle(agent_messages.StopWorker(W, kill=True), 10.0) == [Signal(W, kill=True)]
    assert agent.check_states({W: "R"}, 10.0) == [Signal(W, kill=True)]


def test_a_stop_of_an_ended_worker_is_answered():
    """A stop of an ended worker is answered: the driver may not have received the end."""
    assert Protocol("a", 30.0, 20.0).handle(agent_messages.StopWorker(W, kill=True), 0.0) == [
        Send(ev.WorkerExited(W, 0))
    ]


@pytest.mark.parametrize(("state", "reason"), [("T", "stopped"), ("t", "traced")])
def test_a_stopped_process_is_reported_once(state, reason):
    """A stopped process is reported after two checks, and again for another stop or a new driver."""
    agent = with_worker()
    assert agent.check_states({W: state}, 1.0) == []
    assert agent.check_states({W: state}, 1.1) == [Send(ev.WorkerFrozen(W, reason))]
    assert agent.check_states({W: state}, 1.2) == []
    assert agent.check_states({W: "S"}, 1.3) == agent.check_states({W: state}, 1.4) == []
    assert agent.check_states({W: state}, 1.5) == [Send(ev.WorkerFrozen(W, reason))]
    assert agent.handle(messages.NewDriver(2), 1.6) == [SendHello()]
    assert [agent.check_states({W: state}, at) for at in (1.7, 1.8)] == [[], [Send(ev.WorkerFrozen(W, reason))]]


def test_a_process_in_uninterruptible_sleep_is_reported_after_a_while():
    """A process in uninterruptible sleep is reported with the seconds so far, only while the sleep lasts."""
    agent = with_worker()
    agent.check_states({W: "D"}, 1.0)
    agent.check_states({W: "D"}, 1.5)
    assert agent.blocked(0.9 + BLOCKED) == {}
    assert agent.blocked(1.0 + BLOCKED) == {str(W): BLOCKED}
    agent.check_states({W: "S"}, 2.5)
    assert agent.blocked(9.0) == {}


def test_an_older_driver_is_not_answered():
    """The late message of an older driver is ignored after another driver has taken over."""
    agent = Protocol("a", 30.0, 20.0)
    assert agent.handle(messages.NewDriver(3), 0.0) == [SendHello()]
    assert agent.handle(messages.NewDriver(2), 0.1) == []
    assert agent.handle(messages.NewDriver(3), 0.2) == [SendHello()], "it asks again, as it has not received the answer"


def test_the_highest_incarnation_of_a_slot_is_kept():
    """The highest incarnation of a slot is kept, in whatever order messages come, so that none is used twice."""
    agent = with_worker()
    agent.handle(agent_messages.Spawn(NEXT, "/logs"), 0.0)
    agent.handle(agent_messages.Spawn(W, "/logs"), 0.0)
    assert agent.newest == {0: 2}


def test_the_driver_stops_the_agent():
    """When the driver stops the agent, the agent also ends its workers."""
    assert with_worker().handle(agent_messages.StopAgent(), 0.0) == [End()]


def test_the_lease():
    """Without a driver the agent ends after the lease; workers have a minute more for a last checkpoint."""
    agent = with_worker()
    assert not agent.must_end(heard_at=10.0, now=40.0 + LAST_CHECKPOINT)
    assert agent.must_end(heard_at=10.0, now=40.1 + LAST_CHECKPOINT)
    agent.exited(W, 0)
    assert not agent.must_end(heard_at=10.0, now=40.0)
    assert agent.must_end(heard_at=10.0, now=40.1)


def test_the_cluster_has_ended():
    """After the cluster's end an agent without workers ends at once; workers have time for a last checkpoint."""
    agent = with_worker()
    agent.cluster_ended = True
    assert not agent.must_end(heard_at=10.0, now=40.0 + LAST_CHECKPOINT)
    agent.exited(W, 0)
    assert agent.must_end(heard_at=10.0, now=10.0)


def test_the_kernel_that_owns_the_cluster_has_ended():
    """After the owner's end the agent gives the driver some time, and then ends by itself."""
    agent = with_worker()
    agent.owner_ended(20.0)
    agent.owner_ended(21.0)
    assert not agent.must_end(heard_at=10.0, now=20.0 + OWNER_ENDED), "the driver may be about to notice it"
    assert agent.must_end(heard_at=10.0, now=20.1 + OWNER_ENDED)
    assert not agent.must_end(heard_at=25.0, now=25.0 + OWNER_ENDED)


def test_sigterm_announces_the_end():
    """The driver learns how long the agent lives; the agent ends by itself only if the driver has not ended it by then."""
    agent = with_worker()
    notice = agent_messages.AgentEnding("a", 20.0, "SIGTERM to its agent")
    assert agent.terminated(100.0, 100.0) == [Send(notice)]
    assert agent.check_end(119.0) == []
    ends = [Send(agent_messages.AgentGoodbye("a", "its time is over: SIGTERM to its agent")), End()]
    assert agent.check_end(120.0) == ends


def test_a_second_sigterm_ends_the_agent_at_once():
    """The driver gets a goodbye, so that the others do not wait for this host."""
    agent = with_worker()
    agent.terminated(100.0, 100.0)
    assert agent.terminated(101.0, 101.0) == [
        Send(agent_messages.AgentGoodbye("a", "its agent received SIGTERM twice")),
        End(),
    ]


def test_the_notice_begins_with_the_signal():
    """Time in which the agent could not handle the signal, as it waited for the template, is not added."""
    agent = with_worker()
    assert agent.terminated(100.0, 113.0) == [Send(agent_messages.AgentEnding("a", 7.0, "SIGTERM to its agent"))]


def test_the_driver_cancels_the_end():
    """A host that was added again goes on. Another SIGTERM announces its end as the first one has."""
    agent = with_worker()
    agent.terminated(100.0, 100.0)
    agent.handle(agent_messages.CancelEnd(), 105.0)
    assert agent.check_end(200.0) == []
    assert agent.handle(messages.NewDriver(1), 200.0) == [SendHello()]
    assert agent.terminated(201.0, 201.0) == [Send(agent_messages.AgentEnding("a", 20.0, "SIGTERM to its agent"))]


def test_a_new_driver_learns_of_the_end():
    """After the hello to a new driver comes the announcement, with the time that is left."""
    agent = with_worker()
    agent.terminated(100.0, 100.0)
    notice = Send(agent_messages.AgentEnding("a", 15.0, "SIGTERM to its agent"))
    assert agent.handle(messages.NewDriver(1), 105.0) == [SendHello(), notice]


def test_another_notice_may_shorten_the_time():
    """A later end than the known one changes nothing; none is the second SIGTERM that ends the agent at once."""
    agent = with_worker()
    sigterm = "SIGTERM to its agent"
    assert agent.terminated(100.0, 100.0) == [Send(agent_messages.AgentEnding("a", 20.0, sigterm))]
    assert agent.will_end(161.0, "a drain", 101.0) == [Send(agent_messages.AgentEnding("a", 19.0, sigterm))]
    assert agent.will_end(107.0, "a drain", 102.0) == [Send(agent_messages.AgentEnding("a", 5.0, "a drain"))]
    assert agent.check_end(107.0) == [Send(agent_messages.AgentGoodbye("a", "its time is over: a drain")), End()]


def test_the_first_sigterm_may_come_after_another_notice():
    """A cloud's notice comes first, then the SIGTERM of the shutdown: workers that have not left still have the time."""
    agent = with_worker()
    agent.will_end(115.0, "a cloud", 100.0)
    assert agent.terminated(110.0, 110.0) == [Send(agent_messages.AgentEnding("a", 5.0, "a cloud"))]
    assert agent.terminated(111.0, 111.0)[-1] == End()


def test_a_worker_is_killed_on_request():
    """Injected faults: the worker's process is killed; without a worker, the agent itself. An ended worker is left alone."""
    agent = with_worker()
    assert agent.handle(agent_messages.InjectFault("kill", W), 10.0) == [Harm(W)]
    assert agent.handle(agent_messages.InjectFault("kill", NEXT), 10.0) == []
    assert agent.handle(agent_messages.InjectFault("host"), 10.0) == [Harm(None)]


def test_a_worker_does_not_stay_stopped():
    """A worker that the agent has stopped is reported as frozen. If no driver ends it, the agent kills it after a while."""
    agent = with_worker()
    assert agent.handle(agent_messages.InjectFault("stop", W), 10.0) == [Harm(W, stop=True)]
    assert agent.check_states({W: "T"}, 10.1) == []
    assert agent.check_states({W: "T"}, 10.2) == [Send(ev.WorkerFrozen(W, "stopped"))]
    assert agent.check_states({W: "T"}, 10.0 + STOPPED_FOR) == [Signal(W, kill=True)]


def test_a_worker_that_must_end_is_not_stopped():
    """A fault does not prolong the life of a worker that is about to be killed."""
    agent = with_worker()
    agent.handle(agent_messages.StopWorker(W, kill=False), 10.0)
    assert agent.handle(agent_messages.InjectFault("stop", W), 10.1) == []
    assert agent.check_states({W: "S"}, 10.0 + KILL_AFTER) == [Signal(W, kill=True)]
