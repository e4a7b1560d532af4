"""Connection files, with which a `torchrun` in a terminal joins the cluster from this machine or another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from nbelastic.driver.agents import Agents
from nbelastic.errors import HostError
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.settings import Settings
from nbelastic.protocol.timeouts import LEASE
from nbelastic.provision.host_location import driver_address_towards
from nbelastic.system.future_results import resolve_if_pending
from nbelastic.transport import cluster_file
from nbelastic.transport.keys import Keys


class ConnectionFiles:
    """Lives in the driver's thread. `address` is the server's; `post` puts events into the driver's inbox."""

    def __init__(
        self, settings: Settings, agents: Agents, address: str, keys: Keys, post: Callable[[ev.Event], None]
    ) -> None:
        self._settings, self._agents, self._address, self._keys, self._post = settings, agents, address, keys, post
        self._tasks: set[asyncio.Task[None]] = set()

    def create(self, host: HostSpec | None, result: Future[Path]) -> None:
        """Write the connection file for this machine (None) or another one, and open the address that it names.

        `result` gets the file's path, or a HostError.
        """
        task = asyncio.get_running_loop().create_task(self._create(host, result))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _create(self, host: HostSpec | None, result: Future[Path]) -> None:
        settings, name, address = self._settings, cluster_file.NAME, self._address
        try:
            driver_address = await driver_address_towards(host) if host is not None else ""
            if driver_address:
                address = self._agents.proxied_address(driver_address)
                name = f"cluster-{driver_address.replace(':', '_')}.json"
                self._post(ev.ExternalAccessOpened(driver_address))
            path = settings.run_folder / name
            lease = max(LEASE, settings.silence) if settings.owner else settings.lease
            cluster_file.ClusterFile(settings.name, address, self._keys, lease).write(path)
        except Exception as error:  # noqa: BLE001  (whatever it is, the caller waits for it)
            resolve_if_pending(result.set_exception, HostError(f"the connection file cannot be made: {error}"))
        else:
            resolve_if_pending(result.set_result, path)

    def close(self) -> None:
        """Cancel files that are being made. The driver fails the futures that wait for them."""
        for task in self._tasks:
            task.cancel()
