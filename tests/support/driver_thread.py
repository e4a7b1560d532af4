"""A driver in a thread of the test's own process, where a test can change what its code does."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nbelastic as nbe
from nbelastic.client import driver_link, find_driver, stopping
from nbelastic.client.connection import Connection
from nbelastic.driver import process
from nbelastic.driver.driver import Driver
from nbelastic.protocol import events as ev
from nbelastic.protocol.client_messages import encoded
from nbelastic.protocol.driver_start import Start
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.system.addresses import split_endpoint
from tests.support.waiting import until_async


class DriverThread:
    """In the place of the driver's process."""

    pid = 0
    returncode = None

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        async def serve() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            try:
                await self.driver.serve(self._ready.set)
            finally:
                for client in self._clients:  # also one that has not read all
                    client._transport.abort()
                await asyncio.sleep(0)

        try:
            asyncio.run(serve())
        except BaseException as error:
            self._error = error
        finally:
            self.driver.event_log.close()
            self._ready.set()

    @property
    def _clients(self) -> list[Any]:
        return list(self.driver._clients._open)

    @property
    def ident(self) -> int:
        """Of the thread."""
        return self._thread.ident or 0

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """In the driver's thread."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def ask(self, event: ev.Event) -> None:
        """Have the driver take this event in."""
        self.call(self.driver.post, event)

    def kill(self) -> None:
        """As a kill of the process, which keeps nothing open; the cluster stays as it is."""
        asyncio.run_coroutine_threadsafe(self._die(), self._loop)
        self._thread.join()

    async def _die(self) -> None:
        server = self.driver._server
        await server.stop()  # its port first: who sees the end of a connection starts the next driver
        # A program that another thread starts just now holds the port until it has been executed.
        port = split_endpoint(server.address)[1]
        await until_async(lambda: not is_listened_at(port), what="the killed driver's port to be free")
        if self.driver._clients._server is not None:
            self.driver._clients._server.close()
        self._task.cancel()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("driver", timeout or 0.0)
        return 0


def is_listened_at(port: int) -> bool:
    """Whether a socket listens at this port of the loopback interface; connections that have ended do not matter."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


driver_threads: dict[str, DriverThread] = {}  # the newest of each cluster


def start_driver_process(
    start: Start, folder: Path, on_change: Callable[[], object], predecessor: Connection | None = None
) -> tuple[Connection, DriverThread]:
    """As `client.driver_process.start_driver_process`, without a process."""
    thread = driver_threads[folder.name] = DriverThread(process.prepare(process.decode(encoded(start))))
    return Connection(folder, on_change, predecessor), thread


def kill_driver(run_folder: RunFolder, pid: int) -> None:
    """As `find_driver.kill_driver`."""
    driver_threads[run_folder.name].kill()


def kill_driver_of(cluster: nbe.Cluster) -> None:
    """End the driver of this cluster at once; it sends nothing more."""
    driver_threads[cluster.name].kill()


def use_driver_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers that are started from now on run in threads."""
    monkeypatch.setattr(driver_link, "start_driver_process", start_driver_process)
    for module in (stopping, find_driver):
        monkeypatch.setattr(module, "kill_driver", kill_driver)
