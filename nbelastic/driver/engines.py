"""ipyparallel, on request: its controller, to which workers connect as engines when a client first asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from nbelastic.core import commands as cmd
from nbelastic.core.provisioning import MORE_FILES
from nbelastic.core.state import ClusterState, WorkerState
from nbelastic.driver.agents import Agents
from nbelastic.driver.dependencies import Controller
from nbelastic.driver.workers import Workers
from nbelastic.errors import HostError, UsageError
from nbelastic.protocol import requests as r
from nbelastic.protocol import worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.settings import Settings
from nbelastic.system import open_files
from nbelastic.system.engine_ports import engine_ports
from nbelastic.system.fault_handling import Report

SILENT = "it has not answered"  # why a worker is not an engine, until it answers


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
        self._failures: dict[WorkerId, str] = {}  # why workers are not engines: no request waits for these
        self._controller: Controller | None = None
        self._start_task: asyncio.Task[None] | None = None
        self._why_not = ""  # the controller could not be started
        self._recorded_trouble = ""  # the newest text in the event log about a failed controller

    @property
    def controller_process(self) -> str:
        """The controller's process as `pid@start`; empty if there is none."""
        return self._controller.process if self._controller is not None else ""

    def start(self, *, attach: bool = False) -> None:
        """Start the controller in the background, unless it was started before. `attach`: the previous driver has started it.

        Engines connect to no other controller, so if there are any, the start attaches to theirs.
        """
        if self._start_task is None or self._why_not:
            self._why_not = ""
            attach = attach or any(self._engines.values())
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

    def connected(self, w: WorkerId, engine: str, error: str) -> None:
        """A worker has become this engine or, with an `error`, could not become one."""
        if w in self._engines:
            self._engines[w] = engine
            self._failures.pop(w, None)
            if error:
                self._failures[w] = error
            self._changed()

    def forget(self, workers: Iterable[WorkerId]) -> None:
        """These workers are lost."""
        for w in workers:
            self._engines.pop(w, None)
            self._failures.pop(w, None)

    def request(self, cluster: ClusterState) -> None:
        """A client has sent a request: start the controller, and let workers that have failed connect again. Errors as in `find`."""
        self._refuse(cluster.present_job)
        self.start()
        for w in [w for w, why in self._failures.items() if why != SILENT]:  # a silent one still has the first message
            del self._failures[w]
            self._connect(w)

    def find(self, cluster: ClusterState) -> r.ControllerFound | None:
        """How a client connects to the controller, and the engines; None while the controller starts or workers connect.

        A worker that runs setup cells is not waited for, unless there is no other. During a job main threads run its program,
        and a worker that is not an engine yet cannot become one. UsageError if none is one. HostError if the controller cannot
        be started, if it may not open enough files, or if no worker can connect.
        """
        self._refuse(cluster.present_job)
        if self._why_not:
            raise HostError(f"ipyparallel's controller cannot be started: {self._why_not}")
        controller = self._controller
        waits = not cluster.present_job and self._connecting(cluster)
        if controller is None or not controller.connection or waits:
            return None
        connected = {str(w): engine for w, engine in self._engines.items() if engine}
        failed = {str(w): why for w, why in self._failures.items()}
        if connected:
            return r.ControllerFound(controller.information("client"), connected, failed)
        if failed:
            whys = "; ".join(f"{w}: {why}" for w, why in failed.items())
            raise HostError(f"no worker can connect to ipyparallel's controller: {whys}; the next request tries again.")
        return None

    def stop_waiting(self, cluster: ClusterState) -> None:
        """A request has waited long enough: wait no longer for workers that have not answered."""
        if self._controller is not None and self._controller.connection:
            self._failures |= dict.fromkeys(self._connecting(cluster), SILENT)
            self._changed()

    def _connecting(self, cluster: ClusterState) -> list[WorkerId]:
        starting = {w for w, worker in cluster.workers.items() if worker.state is WorkerState.STARTING}
        return [w for w in self._engines if not self._engines[w] and w not in self._failures and w not in starting]

    def _refuse(self, job: str) -> None:
        """UsageError if no worker can become an engine before the end of the job; HostError if there are too many workers."""
        workers, limit = len(self._engines), open_files.raise_limit()
        if job and workers and not any(self._engines.values()):
            raise UsageError(
                f"{job} is running, and workers connect to ipyparallel between jobs: use %px or Cluster.client before a "
                "job once, or after it; during a job write %%elastic_px --at-commit above a cell."
            )
        if workers > (room := open_files.most_engines(limit)):
            raise HostError(
                f"{workers} workers run, and ipyparallel's controller can connect {room} with {limit} open files: use "
                f"%%elastic_px, which needs no controller. Or: {MORE_FILES}"
            )

    def _connect(self, w: WorkerId) -> None:
        """Have a worker connect to the controller, if that runs and the worker is not an engine yet."""
        connection = self._controller.connection if self._controller is not None else ""
        if connection and not self._engines[w]:
            try:
                self._agents.open_ports(w.host, engine_ports(connection), engines=w.slot + 1)
            except OSError as error:
                self._failures[w] = str(error)
                self._report(f"{w} cannot connect to ipyparallel's controller", error)
            else:
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
            self._save()
            for w in self._engines:
                self._connect(w)
        except Exception as error:  # noqa: BLE001  (training goes on without it)
            why = str(error) or type(error).__name__
            self._record_trouble(f"ipyparallel's controller cannot be started: {why}; the next %px tries again")
            await self._controller.stop()  # it may hold ports
            self._why_not = why  # last: from now on a request starts another one
        finally:
            self._changed()

    def _on_failed(self, reason: str) -> None:
        self._record_trouble(f"ipyparallel's controller fails, and nbelastic starts it again: {reason}")

    def _record_trouble(self, text: str) -> None:
        if text != self._recorded_trouble:
            self._recorded_trouble = text
            self._record(cmd.Record("controller-failed", text))

    def _on_restarted(self) -> None:
        self._record(cmd.Record("controller-started", "ipyparallel's controller had ended; nbelastic started it again"))
