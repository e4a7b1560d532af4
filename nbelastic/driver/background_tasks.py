"""The driver's background tasks: each is started again whenever it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from nbelastic.system.fault_handling import Report, supervise


class BackgroundTasks:
    """Lives in the driver's thread. `report` takes the tasks' errors."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._detectors: list[asyncio.Task[None]] = []
        self._others: list[asyncio.Task[None]] = []

    def start(self, what: str, run: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Start a task, which the caller must cancel. `what` names it in error reports."""
        return asyncio.create_task(supervise(what, run, self._report))

    def keep(self, what: str, run: Callable[[], Awaitable[None]]) -> None:
        """Start a task that runs until the driver ends."""
        self._others.append(self.start(what, run))

    def keep_detecting(self, what: str, run: Callable[[], Awaitable[None]]) -> None:
        """Start a task that may declare hosts and workers lost. It runs as long as the driver makes decisions."""
        self._detectors.append(self.start(what, run))

    def stop_detecting(self) -> None:
        for task in self._detectors:
            task.cancel()

    async def stop(self, more: Iterable[asyncio.Task[None]]) -> None:
        """Cancel all tasks, and wait for their end and that of `more`."""
        tasks = [*self._detectors, *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *more, return_exceptions=True)
