"""Polls a discovery object of this kernel, and sends the hosts that it lists to the driver."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from functools import partial

from nbelastic.client.connection import Connection
from nbelastic.protocol.host_sources import HostDiscovery
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.requests import HostsFound
from nbelastic.provision.discovery import poll_discovery
from nbelastic.system.fault_handling import report_to_log, supervise


class DiscoveryPoller:
    """Polls in its own thread until `stop()`."""

    def __init__(self, discovery: HostDiscovery, key: str, driver: Connection) -> None:
        self._driver, self._key = driver, key
        self._loop = asyncio.new_event_loop()
        report_failure, report_recovery = partial(self._send, None, failed=True), partial(self._send, None)
        poll = partial(poll_discovery, discovery, self._send, report_failure, report_recovery)
        self._task = self._loop.create_task(supervise("a discovery in this kernel", poll, report_to_log))
        self._thread = threading.Thread(target=self._run, name="nbelastic-discovery-poller", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    def _send(self, hosts: tuple[HostSpec, ...] | None, text: str = "", *, failed: bool = False) -> None:
        self._driver.request(HostsFound(self._key, hosts, text, failed))
