"""ipyparallel, on request: its controller, to which workers connect as engines when a client first asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from nbelastic.core import commands as cmd
from nbelastic.driver.agents import Agents
from nbelastic.driver.dependencies import Controller
from nbelastic.driver.workers import Workers
from nbelastic.errors import HostError, UsageError
from nbelastic.protocol import requests as r
from nbelastic.protocol import worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.settings import Settings
from nbelastic.system.engine_ports import engine_ports
from nbelastic.system.fault_handling import Report


class Engines:
    """Lives in the driver's thread. Training needs none of this: only `%px` and `Cluster.client` do.

    `create_controller` makes the controller. `record` adds to the event log, `report` takes unexpected errors, `save` saves the
    driver snapshot, and `changed()` evaluates pending answers.
    """

    def __init__(
        self,
        settings: Settings,
        create_controller: Callable[..., Controller],
        agents: Agents,
        workers: Workers,
        *,
        record: Callable[[cmd.Record], None],
        report: Report,
        save: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._settings, self._create_controller = settings, create_controller
        self._agents, self._workers = agents, workers
        self._record, self._report, self._save, self._changed = record, report, save, changed
        self._engines: dict[WorkerId, str] = {}  # registered workers, with the uuid of those that are engines
        self._controller: Controller | None = None
        self._start_task: asyncio.Task[None] | None = None
        self._why_not = ""  # the controller could not be started
        self._recorded_trouble = ""  # the newest reason in the event log why the controller failed

    @property
    def controller_process(self) -> str:
        """The controller's process as `pid@start`; empty if there is none."""
        return self._controller.process if self._controller is not None else ""

    def start(self, *, attach: bool = False) -> None:
        """Start the controller in the background, unless it was started before. `attach`: the previous driver has started it."""
        if self._start_task is None:
            self._start_task = asyncio.get_running_loop().create_task(self._start(attach=attach))

    async def stop(self) -> None:
        """End the controller, also while it starts."""
        if self._start_task is not None:
            self._start_task.cancel()
            await asyncio.gather(self._start_task, return_exceptions=True)
        if self._controller is not None:
            await self._controller.stop()

    def register(self, w: WorkerId, engine: str = "") -> None:
        """A worker can run code; it is this engine already, or none yet."""
        self._engines[w] = engine or self._engines.get(w, "")
        self._connect(w)

    def connected(self, w: WorkerId, engine: str) -> None:
        """A worker has become this engine."""
        if w in self._engines:
            self._engines[w] = engine
            self._changed()

    def forget(self, workers: Iterable[WorkerId]) -> None:
        """These workers are lost."""
        for w in workers:
            self._engines.pop(w, None)

    def find(self, job: str) -> r.ControllerFound | None:
        """How a client connects to the controller, and the engines; None while the controller starts or workers connect.

        During a `job` main threads run its program, and a worker that is not an engine yet cannot become one. UsageError if none
        is one, HostError if the controller cannot be started.
        """
        if self._why_not:
            why, self._why_not, self._start_task = self._why_not, "", None  # the next request tries again
            raise HostError(f"ipyparallel's controller cannot be started: {why}")
        connected = tuple(filter(None, self._engines.values()))
        if job and self._engines and not connected:
            raise UsageError(
                f"{job} is running, and workers connect to ipyparallel between jobs: use %px or Cluster.client before a "
                "job once, or after it; during a job write %%elastic_px --at-commit above a cell."
            )
        self.start()
        controller = self._controller
        if controller is None or not controller.connection or (len(connected) < len(self._engines) and not job):
            return None
        return r.ControllerFound(controller.information("client"), connected)

    def _connect(self, w: WorkerId) -> None:
        """Have a worker connect to the controller, if that runs and the worker is not an engine yet."""
        connection = self._controller.connection if self._controller is not None else ""
        if connection and not self._engines[w]:
            self._agents.open_ports(w.host, engine_ports(connection))
            self._workers.send([w], worker_messages.ConnectEngine(connection))

    async def _start(self, *, attach: bool) -> None:
        settings = self._settings
        self._controller = self._create_controller(
            settings.run_folder / "ipython",
            settings.name,
            settings.silence,
            settings.driver_lease,
            on_restart=self._on_restarted,
            on_problem=self._on_failed,
            max_engines=self._agents.expected_workers(),
            report=self._report,
        )
        try:
            await (self._controller.attach() if attach else self._controller.start())
        except Exception as error:  # noqa: BLE001  (training goes on without it)
            self._why_not = str(error) or type(error).__name__
            self._on_failed(self._why_not)
            await self._controller.stop()  # it may hold ports
        else:
            self._save()
            for w in self._engines:
                self._connect(w)
        self._changed()

    def _on_failed(self, reason: str) -> None:
        if reason != self._recorded_trouble:
            self._recorded_trouble = reason
            text = f"ipyparallel's controller fails, and nbelastic starts it again: {reason}"
            self._record(cmd.Record("controller-failed", text))

    def _on_restarted(self) -> None:
        self._record(cmd.Record("controller-started", "ipyparallel's controller had ended; nbelastic started it again"))
