"""Cluster files, with which terminals' torchruns come: for this machine, and for others, which are let in by that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from nbelastic.driver.agents import Fleet
from nbelastic.errors import HostError
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.settings import LEASE, Settings
from nbelastic.provision.launchers import here_towards
from nbelastic.system.futures import settle
from nbelastic.transport import cluster_file
from nbelastic.transport.keys import Keys


class Invitations:
    """Lives in the driver's thread. `address` is the hub's; `post` puts events into the driver's inbox."""

    def __init__(
        self, settings: Settings, fleet: Fleet, address: str, keys: Keys, post: Callable[[ev.Event], None]
    ) -> None:
        self._settings, self._fleet, self._address, self._keys, self._post = settings, fleet, address, keys, post
        self._made: set[asyncio.Task[None]] = set()  # just now

    def make(self, there: HostSpec | None, found: Future[Path]) -> None:
        """The cluster file for this machine (None), or for another one; HostError if there can be none."""
        task = asyncio.get_running_loop().create_task(self._make(there, found))
        self._made.add(task)
        task.add_done_callback(self._made.discard)

    async def _make(self, there: HostSpec | None, found: Future[Path]) -> None:
        settings, name, address = self._settings, cluster_file.NAME, self._address
        try:
            here = await here_towards(there) if there is not None else ""
            if here:
                address = self._fleet.lead(here, address)
                name = f"cluster-{here.replace(':', '_')}.json"
                self._post(ev.ExternalAccessOpened(here))
            path = settings.run_dir / name
            lease = max(LEASE, settings.silence) if settings.owner else settings.lease
            cluster_file.ClusterFile(settings.name, address, self._keys, lease).write(path)
        except Exception as error:  # noqa: BLE001  (whatever it is, the caller waits for it)
            settle(found.set_exception, HostError(f"no cluster file can be made: {error}"))
        else:
            settle(found.set_result, path)

    def close(self) -> None:
        """What is not made yet will not be; the driver tells those who wait for it."""
        for task in self._made:
            task.cancel()
