"""What torch and the user's code find in this process: the network interface and the log files."""

from __future__ import annotations

import os
from pathlib import Path

from nbelastic.system import files


def set_interface(name: str) -> None:
    """The network interface of the process groups that are made from now on: torch reads this for each."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name


def log_to(log_dir: str, worker: str) -> None:
    """Point file descriptors 1 and 2 at this worker's own log files, appending: nothing is ever overwritten."""
    folder = Path(log_dir)
    files.make_private(folder)
    stem = worker.replace("/", "-").replace("#", "-")
    for fd, ending in ((1, "out"), (2, "err")):
        files.redirect(folder / f"{stem}.{ending}", fd)
