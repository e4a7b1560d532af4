"""Which discovery of hosts the driver listens to: a list, a script, a plug-in, or one in a kernel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from nbelastic.core import commands as cmd
from nbelastic.driver.parts import Supervised
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.sources import ByClients, Installed, Listed, Script, Source
from nbelastic.provision.discovery import opened, watch


class Discoveries:
    """Lives in the driver's thread.

    `post(event)` puts an event into the driver's inbox, `record` adds to the event log, and `supervised(what, run)` starts a
    task that is started again when it fails.
    """

    def __init__(
        self, post: Callable[[ev.Event], None], record: Callable[[cmd.Record], None], supervised: Supervised
    ) -> None:
        self._post, self._record, self._supervised = post, record, supervised
        self._task: asyncio.Task[None] | None = None  # asks a script or a plug-in
        self._heard = ""  # the key of the discovery in a kernel that is heard
        self._next = ""  # of the one that is heard from its first word on

    def ask(self, source: Source) -> None:
        """Ask there, from now on, where hosts come from."""
        if isinstance(source, Script | Installed):
            failed, recovered = partial(self._found, None, failed=True), partial(self._found, None)
            look = partial(watch, opened(source), self._found, failed, recovered)  # first: it may not be there
        if isinstance(source, ByClients):
            self._next = source.key
            if not self._heard and self._task is None:
                self._heard = source.key
        else:
            self.stop()
            self._heard = self._next = ""
        if isinstance(source, Listed):
            self._found(source.hosts)
        elif isinstance(source, Script | Installed):
            self._task = self._supervised("the host discovery", look)

    def found_by_client(self, key: str, hosts: tuple[HostSpec, ...] | None, text: str, *, failed: bool) -> None:
        """A discovery in a kernel says something. With its first word it takes the place of the one before it."""
        if key == self._next and key != self._heard:
            self.stop()
            self._heard = key
        if key == self._heard:
            self._found(hosts, text, failed=failed)

    def _found(self, hosts: tuple[HostSpec, ...] | None, text: str = "", *, failed: bool = False) -> None:
        """The discovery says: these hosts. Or it has failed (None), or answers again, as `text` tells."""
        if hosts is not None:
            self._post(ev.HostsDiscovered(hosts))
        elif failed:
            self._post(ev.DiscoveryFailed(text))
        else:
            self._record(cmd.Record("discovery-recovered", text))

    def stop(self) -> asyncio.Task[None] | None:
        """Ask no script or plug-in any more. Returns the task that did, which is being cancelled."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        return task
