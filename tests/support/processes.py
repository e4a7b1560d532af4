"""The processes of the test and of a cluster, and the files of a cluster that name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil

import nbelastic as nbe
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.system.folder_paths import runs_folder
from tests.support import warm_agents


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants() -> set[int]:
    """All processes that this one has started, except those that later tests use too.

    These are multiprocessing's resource tracker, and the warm process with its forks.
    """
    found = {child.pid for child in psutil.Process().children(recursive=True)}
    return (
        found - {resource_tracker._resource_tracker._pid} - warm_agents.process.family() - warm_agents.drivers.family()
    )


def leftovers(pids: Iterable[int] = ()) -> list[str]:
    """Each process of `pids` that runs, and each that this process has started, with its command."""
    return [_describe(pid) for pid in {*filter(alive, pids), *descendants()}]


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{process} {' '.join(process.cmdline())[-100:]}"
    except psutil.NoSuchProcess as error:  # also a zombie
        return str(error)


def processes_of(cluster: nbe.Cluster) -> set[int]:
    """The processes of a running cluster: all that this process has started, and the workers."""
    return descendants() | {worker.pid for worker in cluster.workers if worker.pid}


def run_folder(cluster: nbe.Cluster) -> Path:
    """The run folder of a running cluster."""
    return runs_folder() / cluster.name


def driver_pid(cluster: nbe.Cluster) -> int:
    return RunFolder(cluster.name).driver


def controller_file(cluster: nbe.Cluster, ending: str) -> str:
    """The text of a file of ipyparallel's controller.

    `.process` names its process (`pid@start`), `-engine.json` is the connection file for engines.
    """
    return (run_folder(cluster) / "ipython" / "security" / f"ipcontroller-{cluster.name}{ending}").read_text()


def agent_of_worker(worker: Any) -> psutil.Process:
    """The agent is the parent of the template, and the template is the parent of the worker."""
    return psutil.Process(worker.pid).parent().parent()


def node_pid(cluster: nbe.Cluster, host: str) -> int:
    """The process of torch's elastic agent on a host that runs a script: the one that writes the node's log."""
    log = str(cluster.log_dir / cluster.status().job / f"{host}-elastic.log")
    for starter in _starters(cluster):
        for process in starter.children(recursive=True):
            try:
                if any(file.path == log for file in process.open_files()):
                    return process.pid
            except psutil.Error:
                continue
    raise AssertionError(f"{host} has no node")


def agent_of_node(cluster: nbe.Cluster, host: str) -> psutil.Process:
    """The agent whose template is an ancestor of the host's node."""
    agents = {child.pid for starter in _starters(cluster) for child in starter.children()}
    return next(parent for parent in psutil.Process(node_pid(cluster, host)).parents() if parent.pid in agents)


def _starters(cluster: nbe.Cluster) -> Iterator[psutil.Process]:
    """The processes whose children are agents: the driver and the warm process."""
    return (psutil.Process(pid) for pid in (driver_pid(cluster), warm_agents.process.pid))
