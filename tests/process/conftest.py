"""Fixtures that start clusters, and check at the end that no process of them is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nbelastic as nbe
from tests.process import programs
from tests.process.training import Training
from tests.support.nccl_double import CLUSTERS
from tests.support.processes import alive, descendants, processes_of
from tests.support.waiting import until


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that is marked `on_both`, and makes a cluster, runs on the double of NCCL as well."""
    mark = metafunc.definition.get_closest_marker("on_both")
    if mark is not None and not mark.kwargs.get("never") and "backend" in metafunc.fixturenames:
        times = {name: value for name, value in mark.kwargs.items() if name == "seconds"}
        marks = () if mark.kwargs.get("always") else pytest.mark.soak(**times)
        metafunc.parametrize("backend", ["gloo", pytest.param("nccl", marks=marks)], indirect=True)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """Of the clusters that a test makes."""
    return getattr(request, "param", "gloo")


@pytest.fixture
def make(tmp_path: Path, backend: str) -> Iterator[Callable[..., nbe.Cluster]]:
    """Start clusters. At the end the fixture stops them, and waits until all their processes have ended."""
    started: list[nbe.Cluster] = []
    pids: set[int] = set()
    others = descendants()  # of a cluster that several tests share

    def start(hosts: str | None = "localhost:3", **options: Any) -> nbe.Cluster:
        logs = tmp_path / f"logs{len(started)}"
        options = {"cooldown": (0, 0), "stop_timeout": 5, "log_dir": logs, **CLUSTERS[backend], **options}
        options.setdefault("code_sync", False)  # the folder `tests` has 400 files, which each first job would send
        wait = options.pop("wait", True)
        cluster = nbe.Cluster(hosts, **options)
        started.append(cluster)
        cluster.start(wait=wait, timeout=30)
        return cluster

    yield start
    for cluster in started:
        pids |= processes_of(cluster) - others
        cluster.stop()
    until(lambda: not [pid for pid in pids if alive(pid)], 5, "all processes to end")


@pytest.fixture
def trains(make: Callable[..., nbe.Cluster], tmp_path: Path) -> Callable[..., Training]:
    """Start a cluster and train on it: `trains("localhost:3", min=1)`."""

    def start(
        hosts: str = "localhost:3", program: Any = programs.train, kwargs: Any = None, **options: Any
    ) -> Training:
        return Training(make(hosts, **options), tmp_path / "steps", program, **(kwargs or {}))

    return start


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nbe.Cluster]:
    """One host with two slots and one with a single slot, for all tests of a module."""
    with nbe.Cluster("localhost:2,127.0.0.2:1", min=3, cooldown=(0, 0), log_dir=tmp_path_factory.mktemp("logs")) as one:
        until(lambda: all(w.pid for w in one.workers), what="the agents to report all processes")
        yield one


@pytest.fixture
def cluster(shared_cluster: nbe.Cluster) -> Iterator[nbe.Cluster]:
    """The shared cluster. A test may end its jobs, but no worker: the same processes serve all tests."""
    before = {w.id: w.pid for w in shared_cluster.workers}
    yield shared_cluster
    if shared_cluster.job is not None and not shared_cluster.job.done():
        shared_cluster.job.stop()
        shared_cluster.job.wait(timeout=20)
    assert {w.id: w.pid for w in shared_cluster.workers} == before
    assert {host.phase for host in shared_cluster.hosts} == {"up"}
    shared_cluster.wait(3, timeout=10)


@pytest.fixture(scope="module")
def mended_cluster(tmp_path_factory: pytest.TempPathFactory, backend: str) -> Iterator[nbe.Cluster]:
    """Three workers on this machine, for all tests of a module. A worker that a test loses is replaced."""
    options = {"log_dir": tmp_path_factory.mktemp("logs"), "code_sync": False, **CLUSTERS[backend]}
    with nbe.Cluster("localhost:3", min=1, cooldown=(0, 0), **options) as one:
        yield one


@pytest.fixture
def trains_on(mended_cluster: nbe.Cluster, tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """As `trains`, in the cluster of all tests of a module: `trains_on(programs.train)`. Stops a job that a test leaves."""
    started: list[Training] = []

    def start(program: Any = programs.train, *, into: str = "steps", **kwargs: Any) -> Training:
        three = lambda: sum(worker.state == "ready" for worker in mended_cluster.workers) == 3
        until(three, what="three ready workers")
        started.append(Training(mended_cluster, tmp_path / into, program, **kwargs))
        return started[-1]

    yield start
    for training in started:
        if not training.job.done():
            training.job.stop()
            training.job.wait(timeout=20)


@pytest.fixture
def shared_training(trains_on: Callable[..., Training]) -> Training:
    """Three ranks that train, in the cluster of all tests of a module."""
    training = trains_on()
    training.wait_for_world(3)
    return training
