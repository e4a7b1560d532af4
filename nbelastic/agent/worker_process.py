"""A worker's process, as the agent of its host knows it."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from nbelastic.system.processes import last_line

LONGEST_LINE = 200


class WorkerProcess:
    """The process that the template has forked, and the only GPU that it sees. psutil.NoSuchProcess if it has ended."""

    def __init__(self, process: BaseProcess, gpu: str, log: Path) -> None:
        self.process, self.gpu, self._log = process, gpu, log
        self.stats = psutil.Process(process.pid)

    def last_line(self) -> str:
        """The last line of its standard error, cut to LONGEST_LINE characters; empty if it ended well."""
        return last_line(self._log)[:LONGEST_LINE] if self.process.exitcode else ""

    def harm(self, *, stop: bool) -> None:
        """Kill it or, with `stop`, stop it. Another process with its pid is left alone: psutil compares the start times."""
        with suppress(psutil.NoSuchProcess):
            (self.stats.suspend if stop else self.stats.kill)()
