"""What the tests see of clusters on several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

import nbelastic as nbe
from tests.hosts.network import DRIVER, Network
from tests.process.training import Training
from tests.support.waiting import files_in, until

LONG = 60.0  # seconds: hosts start in five of them where the processors have nothing else to do


def strays(network: Network) -> dict[int, str]:
    """What runs on the hosts beside their SSH servers: process -> its command line."""
    found = {}
    for name in network.hosts.keys() - {DRIVER}:
        for pid in network.strays(name):
            try:
                found[pid] = " ".join(psutil.Process(pid).cmdline())
            except psutil.NoSuchProcess:
                continue
    return found


def check_nothing_left(network: Network, temporary: Path, timeout: float = LONG) -> None:
    """No process on any host, and of our files there only logs. (A killed process's multiprocessing leaves its `pymp-…`.)"""
    until(lambda: not strays(network), timeout, f"nothing to be left: {strays(network)}")
    for path in files_in(temporary):
        python_s_own = path.relative_to(temporary).parts[0].startswith("pymp-")
        logs = path.parent.name == "logs" or path.name.endswith((".out", ".err", ".log", ".error.json"))
        assert python_s_own or path.is_dir() or logs, path
        assert not path.name.startswith(("run-", "new-")), path


def event_texts(cluster: nbe.Cluster, kind: str, host: str = "") -> list[str]:
    """Of the events of this kind (and host) their texts."""
    return [event.text for event in cluster.events if event.kind == kind and (not host or event.host == host)]


def host_reasons(cluster: nbe.Cluster) -> dict[str, str]:
    return {host.name: host.reason for host in cluster.hosts}


def host_phases(cluster: nbe.Cluster) -> dict[str, str]:
    return {host.name: host.phase for host in cluster.hosts}


def worker_on(training: Training, host: str) -> Any:
    """The one worker on a host."""
    (worker,) = [w for w in training.cluster.workers if w.host == host]
    return worker


def wait_for_more_steps(training: Training, steps: int = 20) -> None:
    """The training makes these many steps more."""
    last = training.lines()[-1]["step"]
    until(
        lambda: training.job.done() or training.lines()[-1]["step"] >= last + steps,
        LONG,
        f"{steps} steps more; {training.cluster.status().reason}",
    )
    assert not training.job.done(), training.job.exception()
