"""The discovery of hosts that the driver uses: a list, a script, a plug-in, or one in a client's kernel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from nbelastic.core import commands as cmd
from nbelastic.driver.dependencies import StartTask
from nbelastic.protocol import events as ev
from nbelastic.protocol.host_sources import ClientDiscovery, EntryPoint, ListedHosts, ScriptSource, Source
from nbelastic.protocol.ids import HostSpec
from nbelastic.provision.discovery import open_discovery, poll_discovery


class Discoveries:
    """Lives in the driver's thread.

    `post(event)` puts an event into the driver's inbox, `record` adds to the event log, and `start_task(what, run)` starts a
    background task.
    """

    def __init__(
        self, post: Callable[[ev.Event], None], record: Callable[[cmd.Record], None], start_task: StartTask
    ) -> None:
        self._post, self._record, self._start_task = post, record, start_task
        self._task: asyncio.Task[None] | None = None  # polls a script or a plug-in
        self._client_key = ""  # of the discovery in a kernel that is used
        self._next_client_key = ""  # of the one that is used as soon as it reports

    def use(self, source: Source) -> None:
        """Use this discovery from now on. One in a kernel replaces the present one with its first report."""
        if isinstance(source, ScriptSource | EntryPoint):
            failed, recovered = partial(self._on_report, None, failed=True), partial(self._on_report, None)
            poll = partial(
                poll_discovery, open_discovery(source), self._on_report, failed, recovered
            )  # before any change: it may raise
        if isinstance(source, ClientDiscovery):
            self._next_client_key = source.key
            if not self._client_key and self._task is None:
                self._client_key = source.key
        else:
            self.stop()
            self._client_key = self._next_client_key = ""
        if isinstance(source, ListedHosts):
            self._on_report(source.hosts)
        elif isinstance(source, ScriptSource | EntryPoint):
            self._task = self._start_task("the host discovery", poll)

    def receive_from_client(self, key: str, hosts: tuple[HostSpec, ...] | None, text: str, *, failed: bool) -> None:
        """A discovery in a kernel has reported. With its first report it replaces the previous discovery."""
        if key == self._next_client_key and key != self._client_key:
            self.stop()
            self._client_key = key
        if key == self._client_key:
            self._on_report(hosts, text, failed=failed)

    def _on_report(self, hosts: tuple[HostSpec, ...] | None, text: str = "", *, failed: bool = False) -> None:
        """The discovery has listed hosts. Without hosts: it has failed, or works again, as `text` says."""
        if hosts is not None:
            self._post(ev.HostsDiscovered(hosts))
        elif failed:
            self._post(ev.DiscoveryFailed(text))
        else:
            self._record(cmd.Record("discovery-recovered", text))

    def stop(self) -> asyncio.Task[None] | None:
        """Stop polling a script or plug-in. Returns the cancelled task, if there was one."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        return task
