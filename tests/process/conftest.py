"""Clusters for the tests, of which nothing is left afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nbelastic as nbe
from tests.process import programs
from tests.process.training import Training
from tests.support.processes import alive, processes_of
from tests.support.waiting import until


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., nbe.Cluster]]:
    """Start clusters; they are stopped at the end, and nothing of them is left."""
    started: list[nbe.Cluster] = []
    pids: set[int] = set()

    def start(hosts: str | None = "localhost:3", **options: Any) -> nbe.Cluster:
        options = {"cooldown": (0, 0), "stop_timeout": 5, "log_dir": tmp_path / f"logs{len(started)}", **options}
        wait = options.pop("wait", True)
        cluster = nbe.Cluster(hosts, **options)
        started.append(cluster)
        cluster.start(wait=wait, timeout=30)
        return cluster

    yield start
    for cluster in started:
        pids |= processes_of(cluster)
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
