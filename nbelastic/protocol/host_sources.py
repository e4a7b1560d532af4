"""Where the driver finds out which hosts there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from nbelastic.protocol.ids import HostSpec


class ListedHosts(Struct, frozen=True, tag=True):
    """A fixed list of hosts."""

    hosts: tuple[HostSpec, ...]


class ScriptSource(Struct, frozen=True, tag=True):
    """A program that prints the hosts. The driver runs it in `folder` at each poll."""

    command: str  # as the user has written it
    words: tuple[str, ...]
    slots: int  # of a host that is printed without a number
    folder: str


class EntryPoint(Struct, frozen=True, tag=True):
    """An installed discovery: an entry point of the group `nbelastic.discovery`, which is called with `slots`."""

    name: str
    slots: int | None


class ClientDiscovery(Struct, frozen=True, tag=True):
    """A `HostDiscovery` object in a client, which sends `HostsFound` with this key. Others' keys are ignored."""

    key: str


Source = ListedHosts | ScriptSource | EntryPoint | ClientDiscovery


@runtime_checkable
class HostDiscovery(Protocol):
    """Finds the hosts. If it raises, the last answer stays valid; the first call must not raise.

    All calls are made in one thread and one event loop, which belong to the discovery.
    """

    async def hosts(self) -> Sequence[HostSpec]:
        """The present hosts, with their slots."""
        ...
