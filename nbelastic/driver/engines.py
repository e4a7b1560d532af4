"""The only module that knows ipyparallel's controller and client."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import ipyparallel as ipp
from ipyparallel.cluster.launcher import LocalControllerLauncher

from nbelastic.driver.run import Call, Cell

PROGRAM = "__import__('nbelastic.worker.program', fromlist=['call'])"
HEARTBEAT = 100  # milliseconds
LONGER = 10.0  # seconds that ipyparallel waits longer for a silent engine than we do: it would throw its results away
Outcome = tuple[str, Any, str]


def sendable(function: Any, args: Any, kwargs: Any) -> str:
    """Why this call cannot be sent to an engine; empty if it can."""
    from ipyparallel.serialize import pack_apply_message

    try:
        pack_apply_message(function, args, kwargs)
    except Exception as error:  # noqa: BLE001  (pickling fails in many ways)
        return f"{type(error).__name__}: {error}"
    return ""


class ControllerLauncher(LocalControllerLauncher):  # type: ignore[misc]
    """ipyparallel's controller, as `nbelastic.driver.controller` has it."""

    def find_args(self) -> list[str]:
        code = "from nbelastic.driver.controller import main; main()"
        return [sys.executable, "-c", code, *self.cluster_args, *self.controller_args]


class Engines:
    """The controller and a client. `on_engine(uuid)` is called in the loop's thread when an engine can be spoken to."""

    def __init__(self, profile_dir: str, name: str, silence: float, on_engine: Callable[[str], None]) -> None:
        self._profile_dir = profile_dir
        self._name = name
        self._misses = int((silence + LONGER) * 1000 / HEARTBEAT)
        self._on_engine = on_engine
        self._ids: dict[str, int] = {}  # engine uuid -> ipyparallel's number
        self.client: Any = None
        self.connection = ""

    async def start(self) -> None:
        """Start the controller and connect to it."""
        os.makedirs(self._profile_dir, mode=0o700, exist_ok=True)
        self._loop = asyncio.get_running_loop()
        log = logging.getLogger("nbelastic.ipyparallel")
        log.setLevel(logging.CRITICAL)  # what matters is raised; the rest is the controller's own chatter
        self._cluster = ipp.Cluster(
            n=0,
            profile_dir=self._profile_dir,
            cluster_id=self._name,
            controller_launcher_class=ControllerLauncher,
            controller_args=[
                "--nodb",  # the hub's record of every message would grow for ever
                "--usethreads",
                f"--HeartMonitor.period={HEARTBEAT}",  # an engine counts only after a heartbeat
                f"--HeartMonitor.max_heartmonitor_misses={self._misses}",
                "--log-level=40",
            ],
            log=log,
            shutdown_atexit=False,
            delay=0,
        )
        await self._cluster.start_controller()
        info = await self._cluster.controller.get_connection_info()
        self.connection = json.dumps(info["engine"])
        self.client = await self._loop.run_in_executor(None, self._connect, info["client"])

    def _connect(self, info: dict[str, Any]) -> Any:
        client = ipp.Client(connection_info=info, timeout=30, cluster_id=self._name, profile_dir=self._profile_dir)
        client._registration_callbacks.append(self._registered)
        return client

    def _registered(self, event: dict[str, Any]) -> None:
        """In the client's thread."""
        if event["event"] == "register":
            self._ids[event["uuid"]] = int(event["id"])
            self._loop.call_soon_threadsafe(self._on_engine, event["uuid"])

    def knows(self, uuid: str) -> bool:
        return uuid in self._ids

    def forget(self, uuid: str) -> None:
        self._ids.pop(uuid, None)

    def execute(self, uuid: str, source: str, done: Callable[[Any], None]) -> None:
        """Run a cell on one engine; `done(AsyncResult)` is called in the loop's thread."""
        result = self._view(uuid).execute(source, silent=False)
        result.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._with_output, result, done))

    def _with_output(self, result: Any, done: Callable[[Any], None]) -> None:
        """What was printed comes by another socket than the answer, and may come later."""
        waiting = self._loop.run_in_executor(None, result.wait_for_output, 2.0)
        waiting.add_done_callback(lambda _: done(result))

    def run_cell(self, uuid: str, job: str, log_dir: str, cell: Cell, done: Callable[[Outcome], None]) -> None:
        """Run a cell as a job's program."""
        source, checkpoints = cell
        self._apply(uuid, done, "run_cell", job, log_dir, checkpoints, source)

    def run_function(self, uuid: str, job: str, log_dir: str, call: Call, done: Callable[[Outcome], None]) -> None:
        """Run a function as a job's program."""
        function, args, kwargs, checkpoints = call
        self._apply(uuid, done, "call", job, log_dir, checkpoints, function, *args, **kwargs)

    def _apply(self, uuid: str, done: Callable[[Outcome], None], name: str, /, *args: Any, **kwargs: Any) -> None:
        result = self._view(uuid).apply_async(ipp.Reference(f"{PROGRAM}.{name}"), *args, **kwargs)
        result.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._settle, result, done))

    def _settle(self, result: Any, done: Callable[[Outcome], None]) -> None:
        try:
            outcome: Outcome = result.get(timeout=0)
        except ipp.error.EngineError:
            return  # the engine died: its agent tells of that
        except ipp.RemoteError as error:  # outside the program: its value or the program itself cannot be sent
            if error.ename == "EngineError":  # the same death, as the hub tells it
                return
            outcome = ("error", f"{error.ename}: {error.evalue}", str(error.traceback))
        except Exception as error:  # noqa: BLE001  (a value that cannot be unpickled here is the program's error)
            outcome = ("error", f"the result cannot be read here: {type(error).__name__}: {error}", "")
        self.client.purge_local_results(result)
        done(outcome)

    def _view(self, uuid: str) -> Any:
        view = self.client.direct_view(self._ids[uuid])
        view.block = False
        view.track = False
        return view

    async def stop(self) -> None:
        """End client and controller."""
        if self.client is not None:
            await self._loop.run_in_executor(None, self.client.close)
        if getattr(self, "_cluster", None) is not None and self._cluster.controller is not None:
            self._cluster.controller.stop_seconds_until_kill = 1
            await self._loop.run_in_executor(None, self._kill_controller)

    def _kill_controller(self) -> None:
        """It has nothing to tidy up, and asking it takes longer than the kernel has at its end."""
        from nbelastic.processes import kill_group

        launcher = self._cluster.controller
        kill_group(launcher.pid)
        launcher._wait_thread.join(2.0)
