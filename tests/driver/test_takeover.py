"""A new driver waits for the agents that its predecessor knew, and for their workers."""

import asyncio
import os
import time
from types import SimpleNamespace

from nbelastic.core.state import HostPhase
from nbelastic.driver import takeover
from nbelastic.driver.clock import Clock
from nbelastic.driver.driver_snapshot import SavedAgent, SavedJob
from nbelastic.driver.takeover import TakeoverReports
from nbelastic.protocol import agent_messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.connection_events import EnvironmentReported
from nbelastic.protocol.ids import HostSpec, WorkerId
from nbelastic.system.process_identity import identity

WORKERS = [WorkerId("a", 0, 1), WorkerId("a", 1, 1), WorkerId("b", 0, 1)]


def reports_of_two_hosts(patience=30.0, job=None):
    """Return the reports of a cluster with hosts a and b, whose agents have no process on this machine."""
    hosts = tuple(SimpleNamespace(spec=HostSpec(name, 1), phase=HostPhase.UP) for name in "ab")
    agents = {name: SimpleNamespace(process="", job="", is_tunnelled=False) for name in "ab"}
    return TakeoverReports(SimpleNamespace(agents=agents, cluster=SimpleNamespace(hosts=hosts), job=job), patience)


def hello(host):
    return agent_messages.AgentHello(host, 1, {}, workers=tuple((w, 1) for w in WORKERS if w.host == host))


def complete(reports, has_agent=lambda host: True):
    """Whether the driver waits for no agent or worker any more."""
    return asyncio.run(asyncio.wait_for(_ends_at_once(reports, has_agent), 10.0))


async def _ends_at_once(reports, has_agent):
    task = asyncio.create_task(reports.wait(has_agent, time.monotonic))
    for _ in range(3):
        await asyncio.sleep(0)
    ended = task.done()
    task.cancel()
    return ended


def test_the_driver_waits_for_all_agents_and_workers():
    """A new driver waits for all agents and their workers, whose reports come in any order."""
    messages = [
        hello("a"),
        worker_messages.WorkerReport(WORKERS[2], 1),
        worker_messages.WorkerReport(WORKERS[1], 1),
        hello("b"),
    ]
    reports = reports_of_two_hosts()
    for message in messages:
        reports.add(message)
        assert not complete(reports)
    reports.add(worker_messages.WorkerReport(WORKERS[0], 1))
    assert complete(reports)


def test_a_worker_that_becomes_ready_meanwhile_is_ready():
    """Between its report and the end of the takeover a worker says that it can run programs: it need not say it again."""
    reports = reports_of_two_hosts()
    reports.add(worker_messages.WorkerReport(WORKERS[0], 1))
    assert not reports.workers[WORKERS[0]].is_ready
    reports.add(worker_messages.WorkerHello(WORKERS[0], 1))
    assert reports.workers[WORKERS[0]].is_ready


def test_the_driver_does_not_wait_for_an_agent_that_has_ended():
    """A new driver does not wait for an agent whose end it has noticed."""
    reports = reports_of_two_hosts()
    for message in (hello("a"), *(worker_messages.WorkerReport(w, 1) for w in WORKERS[:2])):
        reports.add(message)
    assert not complete(reports)
    assert complete(reports, has_agent=lambda host: host != "b")


def test_the_driver_waits_longer_for_a_host_whose_connection_was_broken(monkeypatch):
    """Also if the previous driver was just opening another one: the process of that tunnel lives, but reaches no host yet."""
    monkeypatch.setattr(takeover, "MIN_TIMEOUT", 0.0)
    hosts = (SimpleNamespace(spec=HostSpec("a", 1), phase=HostPhase.UP),)
    waits = {}
    for disconnected in (False, True):
        agent = SavedAgent(1, identity(os.getpid()), "10.0.0.1", disconnected=disconnected)
        saved = SimpleNamespace(agents={"a": agent}, cluster=SimpleNamespace(hosts=hosts), job=None)
        waits[disconnected] = not complete(TakeoverReports(saved, 0.0))
    assert waits == {False: False, True: True}


def test_a_driver_that_does_not_run_for_an_hour_waits_on(monkeypatch):
    """Its process was stopped while it waited. Its agents and workers have reported meanwhile, but it has not read that."""
    monkeypatch.setattr(takeover, "CHECK_INTERVAL", 0.0)
    machine = [100.0]
    clock = Clock(3.0, lambda: machine[0], lambda: machine[0])
    reports = reports_of_two_hosts(patience=30.0)

    async def story():
        task, ended = asyncio.create_task(reports.wait(lambda _: True, clock.now)), []
        await asyncio.sleep(0)
        for seconds in (3600.0, *[1.0] * 29, 2.0):
            machine[0] += seconds
            for _ in range(20):  # turns: the driver looks several times
                await asyncio.sleep(0)
            ended.append(task.done())
        return ended

    assert asyncio.run(asyncio.wait_for(story(), 30.0)) == [False] * 30 + [True]


def test_the_driver_does_not_wait_for_a_frozen_worker():
    """A new driver does not wait for a frozen worker, and keeps its agent's report."""
    reports = reports_of_two_hosts()
    for message in (hello("a"), hello("b"), *(worker_messages.WorkerReport(w, 1) for w in WORKERS[:2])):
        reports.add(message)
    assert not complete(reports)
    reports.add(ev.WorkerFrozen(WORKERS[2], "stopped"))
    assert complete(reports)
    assert reports.later == [ev.WorkerFrozen(WORKERS[2], "stopped")]


def test_the_driver_waits_until_terminals_have_left_a_scripts_round():
    """A new driver waits for the torchruns of terminals in the last round: it kills the other nodes, whose end would fail them."""
    job = SavedJob(
        "job-1", round=2, external={"remote": "", "here": identity(os.getpid()), "ended": f"{os.getpid()}@1"}
    )
    reports = reports_of_two_hosts(job=job)
    for message in (hello("a"), hello("b"), *(worker_messages.WorkerReport(w, 1) for w in WORKERS)):
        reports.add(message)
    assert not complete(reports)
    reports.add_node_event(sev.NodeReady("remote", 2, "", "default", external=True))
    assert not complete(reports)
    reports.add_node_event(sev.NodeLeft("here", "it has ended"))
    assert complete(reports)


def test_the_driver_does_not_wait_for_an_environment_that_is_being_made():
    """An agent that makes one has no workers; its host stays starting, and its report is handled after the takeover."""
    reports = reports_of_two_hosts()
    reports.add(hello("a"))
    reports.add(worker_messages.WorkerReport(WORKERS[0], 1))
    reports.add(worker_messages.WorkerReport(WORKERS[1], 1))
    reports.add(EnvironmentReported("b", "uv: Downloading timm"))
    assert complete(reports)
    assert (reports.coming, reports.later) == ({"b"}, [EnvironmentReported("b", "uv: Downloading timm")])
