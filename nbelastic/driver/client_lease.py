"""Stops a kept cluster whose lease has expired, and any cluster that clients cannot find any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nbelastic.driver.clients import Clients
from nbelastic.protocol import events as ev
from nbelastic.protocol.run_folder import RunFolder

CHECK_INTERVAL = 5.0  # seconds


async def stop_when_abandoned(
    lease: float | None, clients: Clients, run_folder: RunFolder, post: Callable[[ev.Event], None]
) -> None:
    """Stop a kept cluster after `lease` seconds without a client (None: it is not kept), and any without its lock file.

    A cleaner of temporary folders may remove the lock file; then no client finds the cluster.
    """
    while True:
        alone = clients.alone_for
        if lease is not None and alone >= lease:
            post(ev.StopRequested(f"no client has been connected for {lease:g} s"))
            return
        if not run_folder.is_current:
            post(ev.StopRequested("its lock file was removed"))
            return
        await asyncio.sleep(CHECK_INTERVAL if lease is None else max(0.01, min(CHECK_INTERVAL, lease - alone)))
