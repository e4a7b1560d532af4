"""The kernel and driver of a cluster on other hosts die: ssh clients, TCP proxies and hosts outlive them, or end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nbelastic.system.process_identity import pid_of
from tests.hosts.cluster_checks import LONG, check_nothing_left, event_texts
from tests.hosts.conftest import ROOT
from tests.hosts.network import Network
from tests.process.kernel_process import AttachedTraining, Kernel, attached, start_kernels
from tests.support import soak
from tests.support.processes import alive
from tests.support.waiting import until

SILENCE = 2.0


@pytest.fixture
def kept(network: Network, temporary: Path, tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    """Start kernels with kept clusters on h1 and h2; at the end stop the clusters, and check that nothing is left."""
    defaults = {"hosts": "h1:1,h2:1", "env": {"TMPDIR": str(temporary)}, "cwd": str(ROOT), "silence": SILENCE}
    with start_kernels("far", tmp_path, LONG, **defaults) as start:
        yield start
    network.heal()
    check_nothing_left(network, temporary)


def attach_and_wait(kernel: Kernel, world: int = 2) -> AttachedTraining:
    """Attach to the kernel's cluster, and wait until `world` workers train."""
    training = attached(kernel)
    training.wait_for_world(world, LONG)
    return training


def end(training: AttachedTraining) -> None:
    training.finish(LONG)
    training.cluster.stop()


@pytest.mark.soak(share=0.2)
def test_kernel_and_driver_die(kept):
    """Hosts behind ssh train on, and are connected to the next driver in the same generation."""
    kernel = kept()
    generation = kernel.wait_for_steps(2)
    kernel.kill_with_driver()
    made = len(kernel.steps())
    until(lambda: len(kernel.steps()) > made + 30, LONG, "steps without a driver")
    training = attach_and_wait(kernel)
    assert training.cluster.status().generation == generation
    assert event_texts(training.cluster, "host-lost") == []
    end(training)


@pytest.mark.soak(seconds=10)
def test_kernel_driver_and_a_host_die(kept, network):
    """The survivor waits with its state; the next driver finds the host lost, and uses it again after its reboot."""
    kernel = kept()
    kernel.wait_for_steps(2)
    kernel.kill_with_driver()
    network.power_off("h2")
    training = attach_and_wait(kernel, 1)
    network.reboot("h2")
    training.wait_for_world(2, LONG)
    end(training)


def ssh_processes(kernel):
    """The pids of this machine's ends of the tunnels, and of their ssh clients."""
    tunnels = [pid_of(agent.process) for agent in kernel.snapshot.agents.values()]
    return tunnels, [client.pid for tunnel in tunnels for client in psutil.Process(tunnel).children()]


def end_ssh_clients(kernel):
    """Kill the ssh client of each host, so that its tunnel ends. Return how many there were."""
    tunnels, clients = ssh_processes(kernel)
    for client in clients:
        os.kill(client, signal.SIGKILL)
    until(lambda: not any(map(alive, tunnels)), what="the tunnels to end")
    return len(clients)


@pytest.mark.soak(share=0.2)
def test_kernel_driver_and_ssh_clients_die(kept):
    """The next driver opens the ssh connections again, and all hosts are there in the same generation; so without a death of its own."""
    kernel = kept()
    generation = kernel.wait_for_steps(2)
    kernel.kill_with_driver()
    assert end_ssh_clients(kernel) == 2
    made = len(kernel.steps())
    until(lambda: len(kernel.steps()) > made + 30, LONG, "steps without a driver and without ssh")
    training = attach_and_wait(kernel)
    assert training.cluster.status().generation == generation
    assert end_ssh_clients(kernel) == 2
    until(lambda: len(event_texts(training.cluster, "host-reconnected")) >= 2, LONG, "both hosts to be reached again")
    made = len(kernel.steps())
    until(lambda: len(kernel.steps()) > made + 30, LONG, "steps")
    assert training.cluster.status().generation == generation
    end(training)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "with_driver",
    [pytest.param(False, marks=pytest.mark.soak(seconds=22)), pytest.param(True, marks=pytest.mark.soak(share=0.2))],
)
def test_a_kernel_that_is_stopped_for_a_while(kept, with_driver):
    """A cluster that is not kept trains on while its kernel is stopped: the ssh connections stay.

    With `with_driver` the driver, the tunnels and the ssh clients are stopped too, as on a closed laptop; the driver notices
    that it was away. With `-m soak` it is a minute.
    """
    kernel = kept(keep=False)
    generation = kernel.wait_for_steps(2)
    workers = {line["pid"] for line in kernel.steps() if line["generation"] == generation}
    tunnels, clients = ssh_processes(kernel)
    victims = [kernel.process.pid, *((kernel.driver, *tunnels, *clients) if with_driver else ())]
    stopped = time.time()
    for victim in victims:
        os.kill(victim, signal.SIGSTOP)
    try:
        wait_for_steps_after(kernel, stopped, soak.repetitions(60))
    finally:
        for victim in victims:
            os.kill(victim, signal.SIGCONT)
    if with_driver:
        until(lambda: "driver-away" in event_kinds(kernel), LONG, "the driver to notice that it was away")
    wait_for_steps_after(kernel, time.time(), 3 * SILENCE)
    assert {line["pid"] for line in kernel.steps() if line["t"] > stopped} == workers
    assert {line["generation"] for line in kernel.steps() if line["t"] > stopped} == {generation}
    assert not {"worker-lost", "host-lost", "world-broken"}.intersection(event_kinds(kernel))
    assert ("driver-away" in event_kinds(kernel)) is with_driver
    steps = [line["step"] for line in kernel.steps() if line["pid"] == min(workers)]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    kernel.end()


def wait_for_steps_after(kernel: Kernel, since: float, seconds: float) -> None:
    """Wait for a step that all workers made so many seconds after the time `since`."""

    def late() -> bool:
        newest = {line["pid"]: line["t"] for line in kernel.steps()}
        return min(newest.values()) > since + seconds

    until(late, seconds + LONG, f"steps {seconds} s later")


def event_kinds(kernel: Kernel) -> set[str]:
    """The kinds of the records in the cluster's event log."""
    lines = (kernel.folder.parent / "logs" / "events.jsonl").read_text().splitlines()
    return {json.loads(line).get("record", {}).get("kind", "") for line in lines}


@pytest.mark.soak(seconds=15)
def test_hosts_end_with_the_lease(kept):
    """Without a kernel, hosts on other machines end with the lease, too."""
    kernel = kept(lease=5.0)
    kernel.wait_for_steps(2)
    kernel.kill_with_driver()
    wait_for_end(kernel)


@pytest.mark.soak(seconds=15)
@pytest.mark.parametrize("engines", [False, True])
def test_nothing_is_left_of_a_cluster_that_is_not_kept(kept, engines):
    """When kernel and driver are killed, the tunnels end the rest, ipyparallel's controller included."""
    kernel = kept(keep=False, engines=engines)
    kernel.wait_for_steps(2)
    kernel.kill_with_driver()
    wait_for_end(kernel)


def wait_for_end(kernel: Kernel) -> None:
    """Wait until nothing of the cluster is left, here and on the hosts."""
    workers = {line["pid"] for line in kernel.steps()}
    until(lambda: not kernel.leftovers() and not any(map(alive, workers)), LONG, "nothing to be left")
