"""The network interface for torch, and the log files of this process."""

from __future__ import annotations

import os
from pathlib import Path

from nbelastic.system import private_files
from nbelastic.system.folder_paths import log_file
from nbelastic.system.interfaces import LOOPBACK

# What the user has set. The template imports this module before anything else sets these variables.
_OWN = {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ}


def set_interface(name: str, outward: str = "") -> None:
    """Make process groups on this network interface from now on, unless the user has named others.

    Torch reads gloo's variable for each group. NCCL reads its own once per process, so it never gets the loopback
    interface if the host has an `outward` one: a host of another machine may join later. `=`: no other name that begins so.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = _OWN.get("GLOO_SOCKET_IFNAME", name).partition(",")[0]  # gloo takes one
    nccl = outward if name == LOOPBACK and outward else name
    os.environ["NCCL_SOCKET_IFNAME"] = _OWN.get("NCCL_SOCKET_IFNAME", f"={nccl}")


def log_to(log_dir: str, worker: str) -> None:
    """Append file descriptors 1 and 2 to this worker's log files."""
    private_files.make_own(Path(log_dir))
    for fd, stream in ((1, "out"), (2, "err")):
        private_files.redirect(log_file(log_dir, worker, stream), fd)
