"""A discovery of the user's own, which lives in the kernel: it is asked there, and the driver is told what it says."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from functools import partial

from nbelastic.client.connection import Connection
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.requests import HostsFound
from nbelastic.protocol.sources import HostDiscovery
from nbelastic.provision.discovery import watch
from nbelastic.system.supervise import report_to_log, supervise


class Finder:
    """Asks in a thread of its own until `stop()`."""

    def __init__(self, discovery: HostDiscovery, key: str, driver: Connection) -> None:
        self._driver, self._key = driver, key
        self._loop = asyncio.new_event_loop()
        tell = self._tell
        look = partial(watch, discovery, tell, partial(tell, None, failed=True), partial(tell, None))
        self._task = self._loop.create_task(supervise("a discovery in this kernel", look, report_to_log))
        self._thread = threading.Thread(target=self._run, name="nbelastic-finder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    def _tell(self, hosts: tuple[HostSpec, ...] | None, text: str = "", *, failed: bool = False) -> None:
        self._driver.request(HostsFound(self._key, hosts, text, failed))
