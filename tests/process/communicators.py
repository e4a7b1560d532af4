"""Trainings on the double of NCCL, whose communicators these programs count and cut."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.process import programs

OF_A_WORLD = 2  # communicators: of the default group, and of the program's own


def train_and_count(folder: str) -> dict[str, Any]:
    """Train; each world makes a group of its own. Log after each commit how many communicators the process has."""
    import torch
    import torch.distributed as dist

    from tests.support.nccl_double.communicator import live

    log = programs.Log(folder)
    commit, worlds = nbe.TorchState.commit, set()

    def commit_and_count(state: Any) -> None:
        commit(state)
        if programs.generation() not in worlds:
            worlds.add(programs.generation())
            dist.all_reduce(torch.ones(1), group=dist.new_group())
        log(communicators=len(live), at=programs.generation())

    nbe.TorchState.commit = commit_and_count
    return programs.train(folder)


def train_and_cut(folder: str) -> dict[str, Any]:
    """Train; the first rank that finds `folder/cut` loses its connections to the others, which NCCL's watchdog sees."""
    from tests.support.nccl_double.communicator import live

    def wait() -> None:
        file = Path(folder) / "cut"
        while True:
            with contextlib.suppress(FileNotFoundError):
                file.rename(file.with_name(f"cut-by-{os.getpid()}"))  # only one process succeeds
                for communicator in [*live]:
                    communicator._sees_lost_peers = True
                    for connection in communicator._mesh._peers.values():
                        connection.shutdown(socket.SHUT_RDWR)
            time.sleep(0.05)

    threading.Thread(target=wait, daemon=True).start()
    return programs.train(folder)
