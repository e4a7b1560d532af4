"""Fixtures for hosts of a test network and clusters on them, of which nothing is left afterwards."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nbelastic as nbe
from tests.hosts.cluster_checks import LONG, check_nothing_left
from tests.hosts.network import Network, missing
from tests.process import programs
from tests.process.training import Training
from tests.support.processes import alive, processes_of
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]  # workers import `tests` from here


@pytest.fixture(scope="module")
def module_network() -> Iterator[Network]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    with Network(3) as started:
        yield started


@pytest.fixture
def network(module_network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """Three hosts, h1, h2 and h3, that `ssh` reaches by name; `network.add` starts more. Each test gets them as new."""
    monkeypatch.setenv("PATH", module_network.path, prepend=os.pathsep)
    yield module_network
    module_network.restore()


@pytest.fixture
def temporary(network: Network) -> Path:
    """The folder for temporary files of agents and workers: the same on all hosts, and new in each test."""
    return Path(tempfile.mkdtemp(prefix="tmp-", dir=network.folder))


@pytest.fixture
def make(network: Network, temporary: Path, tmp_path: Path) -> Iterator[Callable[..., nbe.Cluster]]:
    """Start clusters on the network's hosts. At the end the fixture stops them, and checks that nothing of them is left."""
    started: list[nbe.Cluster] = []
    pids: set[int] = set()

    def start(hosts: str | None = "h1:1,h2:1", **options: Any) -> nbe.Cluster:
        options = {"cooldown": (0, 0), "log_dir": tmp_path / f"logs{len(started)}", "cwd": ROOT, **options}
        options["env"] = {"TMPDIR": str(temporary), **options.get("env", {})}
        wait = options.pop("wait", True)
        cluster = nbe.Cluster(hosts, **options)
        started.append(cluster)
        cluster.start(wait=wait, timeout=LONG)
        return cluster

    yield start
    for cluster in started:
        pids |= processes_of(cluster)
        cluster.stop()
    network.heal()
    until(lambda: not [pid for pid in pids if alive(pid)], LONG, "all processes to end")
    check_nothing_left(network, temporary)


@pytest.fixture
def trains(make: Callable[..., nbe.Cluster], tmp_path: Path) -> Callable[..., Training]:
    """Start a cluster and train on it: `trains("h1:1,h2:1", min=1)`."""

    def start(hosts: str = "h1:1,h2:1", program: Any = programs.train, kwargs: Any = None, **options: Any) -> Training:
        # the hosts share this machine's processors: a training must leave some to hosts that start
        kwargs = {"pause": 0.05, **(kwargs or {})}
        return Training(make(hosts, **options), tmp_path / "steps", program, **kwargs)

    return start
