"""Checks and waits for clusters on several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

import nbelastic as nbe
from tests.hosts.network import DRIVER, Network
from tests.process.training import Training
from tests.support.waiting import files_in, until

LONG = 60.0  # seconds; a host starts in about five where the processors are idle


def strays(network: Network) -> dict[int, str]:
    """The processes on the hosts other than SSH servers, with their command lines."""
    found = {}
    for name in network.hosts.keys() - {DRIVER}:
        for pid in network.strays(name):
            try:
                found[pid] = " ".join(psutil.Process(pid).cmdline())
            except psutil.NoSuchProcess:
                continue
    return found


def check_nothing_left(network: Network, temporary: Path, timeout: float = LONG) -> None:
    """Check that no process is left on any host, and no file but logs and the `pymp-…` of killed processes."""
    until(lambda: not strays(network), timeout, f"nothing to be left: {strays(network)}")
    for path in files_in(temporary):
        python_s_own = path.relative_to(temporary).parts[0].startswith("pymp-")
        logs = path.parent.name == "logs" or path.name.endswith((".out", ".err", ".log", ".error.json"))
        assert python_s_own or path.is_dir() or logs, path
        assert not path.name.startswith(("run-", "new-")), path


def event_texts(cluster: nbe.Cluster, kind: str, host: str = "") -> list[str]:
    """The texts of the events of this kind, and of this host if one is given."""
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
    """Wait until the training has made `steps` more steps."""
    last = training.lines()[-1]["step"]
    until(
        lambda: training.job.done() or training.lines()[-1]["step"] >= last + steps,
        LONG,
        f"{steps} steps more; {training.cluster.status().reason}",
    )
    assert not training.job.done(), training.job.exception()
