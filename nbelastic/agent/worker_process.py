"""A worker's process, as the agent of its host knows it."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.process import BaseProcess

import psutil


class WorkerProcess:
    """The process that the template has forked, and the only GPU that it sees. psutil.NoSuchProcess if it has ended."""

    def __init__(self, process: BaseProcess, gpu: str) -> None:
        self.process, self.gpu = process, gpu
        self.stats = psutil.Process(process.pid)

    def harm(self, *, stop: bool) -> None:
        """Kill it or, with `stop`, stop it. Another process with its pid is left alone: psutil compares the start times."""
        with suppress(psutil.NoSuchProcess):
            (self.stats.suspend if stop else self.stats.kill)()
