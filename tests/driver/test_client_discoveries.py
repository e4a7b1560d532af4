"""Host discoveries in the kernels of clients, and which one the driver uses."""

from __future__ import annotations

import threading

import pytest

import nbelastic as nbe
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec
from tests.driver.raw_client import in_driver
from tests.support import driver_thread
from tests.support.waiting import until, until_async


class Own:
    """A discovery of the user's own."""

    found: tuple[HostSpec, ...] = ()
    fails = False
    asked = 0

    async def hosts(self):
        self.asked += 1
        if self.fails:
            raise RuntimeError("no network")
        return self.found


def test_a_discovery_in_a_kernel(start_hostless):
    """What it finds, that it fails and that it answers again is said to the driver; it ends with the cluster."""
    hosts = Own()
    cluster = start_hostless(discovery=hosts)
    kinds = lambda: [event.kind for event in cluster.events]
    until(lambda: hosts.asked)
    hosts.fails = True
    until(lambda: "discovery-failed" in kinds())
    hosts.fails = False
    until(lambda: "discovery-recovered" in kinds())
    threads = {thread.name for thread in threading.enumerate()}
    assert "nbelastic-discovery-poller" in threads
    in_driver(cluster, lambda driver: driver.post(ev.StopRequested("by the driver itself")))
    until(lambda: "nbelastic-discovery-poller" not in {thread.name for thread in threading.enumerate()})


def test_an_attach_with_a_script_has_hosts_come_from_there(start_hostless, tmp_path):
    """From now on, whatever said so before."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    cluster = start_hostless()
    until(
        lambda: in_driver(cluster, lambda driver: driver.cluster.discovered)
    )  # else the failure would end the cluster
    with nbe.Cluster.attach("quiet", discovery=str(script)) as other:
        until(lambda: any("hosts.sh failed with exit code 1" in event.text for event in cluster.events))
        other.detach()


class Slow:
    """A discovery that finds a host only when `go` is set; `looks` counts its answers."""

    def __init__(self, *hosts):
        self.go, self.looks, self._hosts = threading.Event(), 0, tuple(HostSpec(host, 1) for host in hosts)

    async def hosts(self):
        await until_async(self.go.is_set)
        self.looks += 1
        return self._hosts


@pytest.mark.parametrize("own", [False, True])
def test_who_found_hosts_before_is_not_heard_any_more(start_hostless, tmp_path, own):
    """Its first look ends when somebody else has said where hosts come from: a script, or an object of another kernel."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    before, after = Slow("nowhere.invalid"), Slow()
    after.go.set()
    cluster = start_hostless(discovery=before)
    with nbe.Cluster.attach("quiet", discovery=after if own else str(script)) as other:
        if own:  # it takes the other's place with its first word
            until(
                lambda: in_driver(
                    cluster,
                    lambda driver: (
                        driver._components.discoveries._client_key == driver._components.discoveries._next_client_key
                    ),
                )
            )
        before.go.set()
        until(lambda: before.looks > 1)
        assert (list(cluster.hosts), [event.kind for event in cluster.events if event.host]) == ([], [])
        other.detach()
    after.go.set()


def test_who_finds_hosts_is_heard_until_another_says_something(start_hostless):
    """Somebody attaches with an object that never answers, or that fails: hosts come from where they came from."""
    before, after = Slow("nowhere.invalid"), Slow()
    cluster = start_hostless(discovery=before)
    with nbe.Cluster.attach("quiet", discovery=after) as other:
        before.go.set()
        until(lambda: [host.name for host in cluster.hosts] == ["nowhere.invalid"])
        other.detach()
    after.go.set()


def test_a_script_that_was_attached_with_is_remembered(start_hostless, tmp_path):
    """Who attaches later need not say it again, also after the driver has died."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    cluster = start_hostless(keep=True)
    nbe.Cluster.attach("quiet", discovery=str(script)).detach()
    assert nbe.Cluster.attach("quiet")._link.configuration.arguments["discovery"] == str(script)
    driver_thread.kill_driver(cluster._link.run_folder, 0)
    with nbe.Cluster.attach("quiet") as again:
        assert again._link.configuration.arguments["discovery"] == str(script)
