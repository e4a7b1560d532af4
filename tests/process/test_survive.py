"""The kernel dies, and the training does not: another kernel takes it over, or it ends within its lease."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nbelastic as nbe
from tests.process.observing import alive, undisturbed, until
from tests.process.surviving import Kernel, attached

WORLD = 3


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    """Start kernels with kept clusters; at the end whoever has them stops them, and nothing of them is left."""
    started: list[Kernel] = []

    def start(**options: Any) -> Kernel:
        kernel = Kernel(f"kept-{os.getpid()}-{len(started)}", tmp_path / f"steps{len(started)}", **options)
        started.append(kernel)
        return kernel.ready()

    yield start
    for kernel in started:
        kernel.kill()
        if any(info.name == kernel.name for info in nbe.Cluster.all()):
            nbe.Cluster.attach(kernel.name).stop()
        until(lambda kernel=kernel: not kernel.left(), 10, f"nothing to be left of {kernel.name}")


def test_a_killed_kernel_costs_no_step(kept):
    """Nobody stands still: the world goes on while no driver is there, and comes back as it is, with its job and history."""
    kernel = kept()
    kernel.makes_steps(WORLD)
    kernel.kill()
    made = len(kernel.steps())
    until(lambda: len(kernel.steps()) > made + 30, what="steps without a driver")
    before = set(kernel.processes())
    training = attached(kernel)
    members = training.runs(WORLD)
    assert training.job.name == "job-1"
    assert training.cluster.status().epoch == 1
    assert set(kernel.processes()) == before
    texts = [event.text for event in training.cluster.events]
    assert "job-1 was submitted" in texts
    assert f"{WORLD} workers train on in epoch 1" in texts
    training.strike(members[0])  # all that a driver does, it does
    training.runs(WORLD)
    results = training.finish()
    assert len(results) == WORLD
    training.cluster.stop()


@pytest.mark.parametrize("first", ["kernel", "part"])
@pytest.mark.parametrize("part", ["worker", "agent", "template", "controller"])
def test_a_kernel_and_another_part_die(kept, part, first):
    """In either order: survivors wait with their state instead of hanging; the next kernel makes all whole again."""
    kernel = kept(hosts="localhost:2,127.0.0.2:1")
    kernel.makes_steps(WORLD)
    victim = kernel.part(part)
    if first == "kernel":
        kernel.kill()
        os.kill(victim, signal.SIGKILL)
    else:
        os.kill(victim, signal.SIGKILL)
        kernel.kill()
    until(lambda: not alive(victim), what=f"the {part} to end")
    training = attached(kernel)
    training.runs(WORLD)
    assert len(training.finish()) == WORLD
    training.cluster.stop()


def test_nobody_comes(kept, tmp_path):
    """All ends within the lease, after a last checkpoint; then nothing is left, and the name is free again."""
    folder = tmp_path / "checkpoints"
    kernel = kept(lease=10.0, arguments={"checkpoint": str(folder), "checkpoint_every": 1_000_000})
    kernel.makes_steps(WORLD)
    kernel.kill()
    until(lambda: not kernel.left(), 40, "nothing to be left")
    last = max(line["step"] for line in kernel.steps())
    newest = max(path.name for path in folder.iterdir())
    assert int(newest.rpartition("-")[2]) in range(last - 1, last + 1)


def test_an_ordinary_restart(kept):
    """A kernel that ends in order lets go of its cluster as one that is killed."""
    kernel = kept()
    kernel.makes_steps(WORLD)
    kernel.end()
    training = attached(kernel)
    training.runs(WORLD)
    assert training.cluster.status().epoch == 1
    training.finish()
    training.cluster.stop()


def test_the_newer_driver_wins(kept):
    """One that has the cluster is told who took it, and refuses orders; nobody who trains is disturbed."""
    kernel = kept()
    kernel.makes_steps(WORLD)
    kernel.kill()
    older = attached(kernel)
    older.runs(WORLD)
    with undisturbed(older):
        newer = attached(kernel)
        newer.runs(WORLD)
        with pytest.raises(nbe.ClusterStoppedError, match="taken over by process"):
            older.cluster.scale(max=5)
        with pytest.raises(nbe.JobStoppedError, match="taken over"):
            older.job.result(timeout=5)
        older.cluster.stop()  # is nothing to the newer
        assert newer.cluster.status().epoch == 1
    assert len(newer.finish()) == WORLD
    newer.cluster.stop()
