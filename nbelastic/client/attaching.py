"""Attaches to a cluster that runs: connects to its driver or, if that has died, starts the next one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from nbelastic.client.driver_link import NOT_ATTACHED, DriverLink
from nbelastic.client.find_driver import connect_to_driver
from nbelastic.client.saved_arguments import arguments_to_attach
from nbelastic.protocol.host_sources import HostDiscovery
from nbelastic.protocol.local_clusters import SnapshotHead, read, start_timeout


class _Linked(Protocol):
    _link: DriverLink


T = TypeVar("T", bound=_Linked)


def attach_cluster(create: Callable[..., T], folder: Path, discovery: str | HostDiscovery | None) -> T:
    """Create a `Cluster` with the saved arguments of the cluster that has this run folder, and attach it."""
    timeout = start_timeout(folder)
    driver = connect_to_driver(folder, timeout)
    found = read(folder, SnapshotHead) if driver is None else driver
    try:
        cluster = create(**arguments_to_attach(folder.name, str(found.log_dir), found.arguments, discovery))
    except BaseException:
        if driver is not None:
            driver.leave(NOT_ATTACHED)
        raise
    cluster._link.attach(driver, found.arguments, discovery, timeout)
    return cluster
