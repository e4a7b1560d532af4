"""Kernel and driver die, and their cluster is on other machines: ssh clients, gates and hosts outlive them, or end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbelastic.system.process_identity import pid_of
from tests.hosts.cluster_checks import LONG, check_nothing_left, event_texts
from tests.hosts.conftest import ROOT
from tests.hosts.network import Network
from tests.process.kernel_process import AttachedTraining, Kernel, attached, start_kernels
from tests.support.processes import alive
from tests.support.waiting import until

SILENCE = 2.0
OLD_LEASE = 8.0  # seconds that agents on other machines used to live without word of the driver


@pytest.fixture
def kept(network: Network, temporary: Path, tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    """A kernel with a kept cluster on h1 and h2; at the end whoever has it stops it, and nothing of it is left anywhere."""
    usual = {"hosts": "h1:1,h2:1", "env": {"TMPDIR": str(temporary)}, "cwd": str(ROOT), "silence": SILENCE}
    with start_kernels("far", tmp_path, LONG, **usual) as start:
        yield start
    network.heal()
    check_nothing_left(network, temporary)


def whole(kernel: Kernel, world: int = 2) -> AttachedTraining:
    """It is attached to, and trains."""
    training = attached(kernel)
    training.wait_for_world(world, LONG)
    return training


def end(training: AttachedTraining) -> None:
    training.finish(LONG)
    training.cluster.stop()


def test_the_kernel_alone(kept):
    """Hosts behind ssh and a gate go on, and are there again for the next kernel, which nobody who trains notices."""
    kernel = kept()
    generation = kernel.wait_for_steps(2)
    kernel.kill_with_driver()
    made = len(kernel.steps())
    until(lambda: len(kernel.steps()) > made + 30, LONG, "steps without a driver")
    training = whole(kernel)
    assert training.cluster.status().generation == generation
    assert event_texts(training.cluster, "host-lost") == []
    end(training)


def test_the_kernel_and_a_host(kept, network):
    """Who is left waits with its state; the host is lost to the next kernel, and comes back when it is there again."""
    kernel = kept()
    kernel.wait_for_steps(2)
    kernel.kill_with_driver()
    network.power_off("h2")
    training = whole(kernel, 1)
    network.reboot("h2")
    training.wait_for_world(2, LONG)
    end(training)


def test_the_kernel_and_its_gate(kept):
    """It is opened again with the same doors, and all come back."""
    kernel = kept()
    generation = kernel.wait_for_steps(2)
    gates = [pid_of(gate.process) for gate in kernel.snapshot.proxies]
    assert gates
    kernel.kill_with_driver()
    for gate in gates:
        os.kill(gate, signal.SIGKILL)
    until(lambda: not any(map(alive, gates)), what="the gates to end")
    training = whole(kernel)
    assert training.cluster.status().generation == generation
    gates = [pid_of(gate.process) for gate in kernel.snapshot.proxies]
    for gate in gates:
        os.kill(gate, signal.SIGKILL)
    until(lambda: not any(map(alive, gates)), what="the gates to end")
    made = len(kernel.steps())
    until(lambda: len(kernel.steps()) > made + 30, LONG, "steps")
    assert training.cluster.status().generation == generation
    end(training)


@pytest.mark.parametrize("with_driver", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_kernel_that_is_stopped_for_a_while(kept, with_driver):
    """Nobody notices, without `keep` too: hosts at the other end of an ssh line that stands go on training.

    Of a laptop whose lid is closed the driver is stopped as well; it notices that it was away.
    """
    kernel = kept(keep=False)
    generation = kernel.wait_for_steps(2)
    workers = {line["pid"] for line in kernel.steps() if line["generation"] == generation}
    victims = [kernel.process.pid, *([kernel.driver] if with_driver else [])]
    stopped = time.time()
    for victim in victims:
        os.kill(victim, signal.SIGSTOP)
    try:
        trained_for(kernel, stopped, OLD_LEASE + 2)
    finally:
        for victim in victims:
            os.kill(victim, signal.SIGCONT)
    if with_driver:
        until(lambda: "driver-away" in kinds(kernel), LONG, "the driver to notice that it was away")
    trained_for(kernel, time.time(), 3 * SILENCE)
    assert {line["pid"] for line in kernel.steps() if line["t"] > stopped} == workers
    assert {line["generation"] for line in kernel.steps() if line["t"] > stopped} == {generation}
    assert not {"worker-lost", "host-lost", "world-broken"}.intersection(kinds(kernel))
    assert ("driver-away" in kinds(kernel)) is with_driver
    steps = [line["step"] for line in kernel.steps() if line["pid"] == min(workers)]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    kernel.end()


def trained_for(kernel: Kernel, since: float, seconds: float) -> None:
    """Wait for a step that all workers made so many seconds after the time `since`."""

    def late() -> bool:
        newest = {line["pid"]: line["t"] for line in kernel.steps()}
        return min(newest.values()) > since + seconds

    until(late, LONG, f"steps {seconds} s later")


def kinds(kernel: Kernel) -> set[str]:
    """Of the lines for people in its event log."""
    lines = (kernel.folder.parent / "logs" / "events.jsonl").read_text().splitlines()
    return {json.loads(line).get("record", {}).get("kind", "") for line in lines}


@pytest.mark.soak
def test_nobody_comes(kept):
    """Hosts elsewhere end with the lease, too."""
    kernel = kept(lease=5.0)
    kernel.wait_for_steps(2)
    kernel.kill_with_driver()
    ends(kernel)


@pytest.mark.soak
@pytest.mark.parametrize("with_controller", [False, True])
def test_nothing_is_left_of_a_cluster_that_is_not_kept(kept, with_controller):
    """The kernel and its driver are killed, and ipyparallel's controller, which sees to that: then the gate does."""
    kernel = kept(keep=False)
    kernel.wait_for_steps(2)
    controller = kernel.pid_of("controller")
    if with_controller:
        os.kill(controller, signal.SIGSTOP)
    kernel.kill_with_driver()
    if with_controller:
        os.kill(controller, signal.SIGKILL)
    ends(kernel)


def ends(kernel: Kernel) -> None:
    """Nothing is left of it, here and elsewhere."""
    workers = {line["pid"] for line in kernel.steps()}
    until(lambda: not kernel.leftovers() and not any(map(alive, workers)), LONG, "nothing to be left")
