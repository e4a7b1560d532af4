"""The network interface for torch, and the log files of this process."""

from __future__ import annotations

import os
from pathlib import Path

from nbelastic.system import private_files


def set_interface(name: str) -> None:
    """Make process groups on this network interface from now on: torch reads the variables for each group."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name


def log_to(log_dir: str, worker: str) -> None:
    """Append file descriptors 1 and 2 to this worker's log files."""
    folder = Path(log_dir)
    private_files.make_private(folder)
    stem = worker.replace("/", "-").replace("#", "-")
    for fd, ending in ((1, "out"), (2, "err")):
        private_files.redirect(folder / f"{stem}.{ending}", fd)
