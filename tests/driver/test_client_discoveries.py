"""Host discoveries in the kernels of clients, and which of them the driver uses."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import pytest

import nbelastic as nbe
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec
from nbelastic.provision import discovery
from tests.driver.raw_client import in_driver
from tests.support import driver_thread
from tests.support.waiting import until, until_async


class UserDiscovery:
    """A discovery that the user wrote."""

    found: tuple[HostSpec, ...] = ()
    fails = False
    polls = 0

    async def hosts(self):
        self.polls += 1
        if self.fails:
            raise RuntimeError("no network")
        return self.found


class ShuffledDiscovery:
    """A discovery that lists two hosts in another order each time, as a script does that prints a set; the fifth list has one."""

    polls = 0

    async def hosts(self):
        self.polls += 1
        hosts = [HostSpec("a", 1), HostSpec("b", 1)]
        return hosts[: 1 if self.polls == 5 else 2][:: -1 if self.polls % 2 else 1]


class OnceCancelledDiscovery:
    """A discovery whose first poll waits for a task that was cancelled, or ends as a program does."""

    def __init__(self, problem):
        self.problem = problem

    async def hosts(self):
        problem, self.problem = self.problem, None
        if problem is not None:
            raise problem
        return [HostSpec("a", 1)]


@pytest.mark.parametrize("problem", [asyncio.CancelledError(), SystemExit("no credentials")], ids=["cancelled", "exit"])
def test_a_discovery_that_is_cancelled_or_exits_is_polled_again(problem):
    """Such a poll fails at once, with its reason. The next one answers."""

    async def poll():
        thread = discovery.DiscoveryThread(OnceCancelledDiscovery(problem))
        with pytest.raises(nbe.DiscoveryError, match=f"OnceCancelledDiscovery raised {type(problem).__name__}"):
            await asyncio.wait_for(thread.hosts(), 10)
        assert await asyncio.wait_for(thread.hosts(), 10) == (HostSpec("a", 1, ""),)
        await thread.close()

    asyncio.run(poll())


def test_the_same_hosts_in_another_order_are_no_change(monkeypatch):
    """Only another set of hosts is passed on: each list that is, is a line in the event log."""
    monkeypatch.setattr(discovery, "POLL", 0.0)
    changes: list[set[str]] = []

    async def poll():
        polled = discovery.poll_discovery(
            ShuffledDiscovery(), lambda hosts: changes.append({host.name for host in hosts}), print, print
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                task = asyncio.create_task(polled)
                await until_async(lambda: len(changes) >= 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(poll())
    assert changes[:3] == [{"a", "b"}, {"a"}, {"a", "b"}]


def test_a_discovery_in_a_kernel(start_hostless):
    """The driver records when a kernel's discovery fails and recovers; the polling thread ends with the cluster."""
    hosts = UserDiscovery()
    cluster = start_hostless(discovery=hosts)
    kinds = lambda: [event.kind for event in cluster.events]
    until(lambda: hosts.polls)
    hosts.fails = True
    until(lambda: "discovery-failed" in kinds())
    hosts.fails = False
    until(lambda: "discovery-recovered" in kinds())
    threads = {thread.name for thread in threading.enumerate()}
    assert "nbelastic-discovery-poller" in threads
    in_driver(cluster, lambda driver: driver.post(ev.StopRequested("by the driver itself")))
    until(lambda: "nbelastic-discovery-poller" not in {thread.name for thread in threading.enumerate()})


def test_an_attached_script_replaces_the_discovery(start_hostless, tmp_path):
    """A script that a client attaches with replaces the earlier discovery."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    cluster = start_hostless()
    until(
        lambda: in_driver(cluster, lambda driver: driver.cluster.discovered)
    )  # without an earlier answer the failure would end the cluster
    with nbe.Cluster.attach("quiet", discovery=str(script)) as other:
        until(lambda: any("hosts.sh failed with exit code 1" in event.text for event in cluster.events))
        other.detach()


class BlockedDiscovery:
    """A discovery that lists its hosts only after `go` is set; `answers` counts its answers."""

    def __init__(self, *hosts):
        self.go, self.answers, self._hosts = threading.Event(), 0, tuple(HostSpec(host, 1) for host in hosts)

    async def hosts(self):
        await until_async(self.go.is_set)
        self.answers += 1
        return self._hosts


@pytest.mark.parametrize("is_object", [False, True])
def test_a_replaced_discovery_has_no_effect(start_hostless, tmp_path, is_object):
    """An answer of the earlier discovery has no effect after a client attached with a script or an object."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    before, after = BlockedDiscovery("nowhere.invalid"), BlockedDiscovery()
    after.go.set()
    cluster = start_hostless(discovery=before)
    with nbe.Cluster.attach("quiet", discovery=after if is_object else str(script)) as other:
        if is_object:  # it replaces the earlier one with its first answer
            until(
                lambda: in_driver(
                    cluster,
                    lambda driver: (
                        driver._components.discoveries._client_key == driver._components.discoveries._next_client_key
                    ),
                )
            )
        before.go.set()
        until(lambda: before.answers > 1)
        assert (list(cluster.hosts), [event.kind for event in cluster.events if event.host]) == ([], [])
        other.detach()
    after.go.set()


def test_a_discovery_is_used_until_the_next_one_answers(start_hostless):
    """The driver uses the earlier discovery until the one of a new client has answered."""
    before, after = BlockedDiscovery("nowhere.invalid"), BlockedDiscovery()
    cluster = start_hostless(discovery=before)
    with nbe.Cluster.attach("quiet", discovery=after) as other:
        before.go.set()
        until(lambda: [host.name for host in cluster.hosts] == ["nowhere.invalid"])
        other.detach()
    after.go.set()


def test_a_script_that_was_attached_with_is_remembered(start_hostless, tmp_path):
    """A later attach gets the attached script without naming it, also from the next driver."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\n")  # it must not fail: a discovery that fails at its first look ends the cluster
    script.chmod(0o755)
    cluster = start_hostless(keep=True)
    nbe.Cluster.attach("quiet", discovery=str(script)).detach()
    assert nbe.Cluster.attach("quiet")._link.configuration.arguments["discovery"] == str(script)
    driver_thread.kill_driver_of(cluster)
    with nbe.Cluster.attach("quiet") as again:
        assert again._link.configuration.arguments["discovery"] == str(script)
