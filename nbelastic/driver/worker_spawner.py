"""Starts ipyparallel's controller, and spawns workers as soon as it accepts their engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbelastic.core import commands as cmd
from nbelastic.driver.dependencies import Controller
from nbelastic.errors import HostError
from nbelastic.protocol import events as ev
from nbelastic.protocol.settings import Settings
from nbelastic.system.fault_handling import Report


class WorkerSpawner:
    """Lives in the driver's thread. Workers wait for the controller, because they register their engines with it.

    `create_controller` makes the controller, `spawn_now(command, log_dir, connection)` has an agent start a worker, and
    `expected_workers()` returns how many workers the controller must serve.
    """

    def __init__(
        self,
        settings: Settings,
        create_controller: Callable[..., Controller],
        spawn_now: Callable[[cmd.StartWorker, Path, str], None],
        expected_workers: Callable[[], int],
        *,
        post: Callable[[ev.Event], None],
        record: Callable[[cmd.Record], None],
        report: Report,
        save: Callable[[], None],
    ) -> None:
        self._settings, self._create_controller = settings, create_controller
        self._spawn_now, self._expected_workers = spawn_now, expected_workers
        self._post, self._record, self._report, self._save = post, record, report, save
        self._queue: list[tuple[cmd.StartWorker, Path]] = []  # workers that wait for the controller
        self._controller: Controller | None = None
        self._start_task: asyncio.Task[None] | None = None
        self._recorded_trouble = ""  # the newest reason in the event log why the controller failed

    @property
    def controller_process(self) -> str:
        """The controller's process as `pid@start`; empty if there is none yet."""
        return self._controller.process if self._controller is not None else ""

    @property
    def client_information(self) -> dict[str, Any] | None:
        """How a client connects to ipyparallel's controller; None before the controller runs."""
        if self._controller is None or not self._controller.connection:
            return None
        return self._controller.information("client")

    def start_in_background(self) -> None:
        """Start the controller, unless it was started before."""
        if self._start_task is None:
            self._start_task = asyncio.get_running_loop().create_task(self._start(attach=False))

    async def start(self, *, attach: bool) -> None:
        """Start the controller and wait for it. `attach`: the previous driver has started it."""
        self._start_task = asyncio.get_running_loop().create_task(self._start(attach=attach))
        await self._start_task

    def cancel_start(self) -> list[asyncio.Task[None]]:
        """Cancel the start of the controller. Returns the task to wait for, if there is one."""
        if self._start_task is None:
            return []
        self._start_task.cancel()
        return [self._start_task]

    async def stop_controller(self) -> None:
        """Must be the last step of a driver's end: if the driver is killed before, the controller removes the run folder."""
        if self._controller is not None:
            await self._controller.stop()

    def spawn(self, command: cmd.StartWorker, log_dir: Path) -> None:
        """Spawn a worker now, or as soon as the controller accepts it."""
        if self._controller is None or not self._controller.connection:
            self._queue.append((command, log_dir))
        else:
            self._spawn_now(command, log_dir, self._controller.connection)

    async def _start(self, *, attach: bool) -> None:
        settings = self._settings
        self._controller = self._create_controller(
            settings.run_folder / "ipython",
            settings.name,
            settings.silence,
            settings.driver_lease,
            on_restart=self._on_restarted,
            on_problem=self._on_failed,
            max_engines=self._expected_workers(),
            report=self._report,
        )
        try:
            await (self._controller.attach() if attach else self._controller.start())
        except Exception as error:
            if attach:  # a cluster runs: it must not be stopped for this
                raise HostError(f"ipyparallel's controller cannot be started ({error}): attach again.") from error
            self._post(ev.StopRequested(f"ipyparallel's controller could not be started: {error}"))
            return
        self._save()
        for command, log_dir in self._queue:
            self._spawn_now(command, log_dir, self._controller.connection)
        self._queue.clear()

    def _on_failed(self, reason: str) -> None:
        if reason != self._recorded_trouble:
            self._recorded_trouble = reason
            text = f"ipyparallel's controller fails, and nbelastic starts it again: {reason}"
            self._record(cmd.Record("controller-failed", text))

    def _on_restarted(self) -> None:
        self._record(cmd.Record("controller-started", "ipyparallel's controller had ended; nbelastic started it again"))
