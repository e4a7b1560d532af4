"""Where hosts come from, as a driver is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from nbelastic.protocol.ids import HostSpec


class Listed(Struct, frozen=True, tag=True):
    """These hosts, for as long as nobody says otherwise."""

    hosts: tuple[HostSpec, ...]


class Script(Struct, frozen=True, tag=True):
    """A program, run in `folder` for each look. `command`: as somebody has written it."""

    command: str
    words: tuple[str, ...]
    slots: int
    folder: str


class Installed(Struct, frozen=True, tag=True):
    """An entry point of the group `nbelastic.discovery`, called with `slots`."""

    name: str
    slots: int | None


class ByClients(Struct, frozen=True, tag=True):
    """An object in a kernel, which says what it has found, with this `key`: others that have said so before do not count."""

    key: str


Source = Listed | Script | Installed | ByClients  # where hosts come from, as it is said to a driver


@runtime_checkable
class HostDiscovery(Protocol):
    """Says which hosts there are now. Raising keeps the last good answer (but fails the very first time).

    It is asked in a thread and an event loop of its own, always the same ones.
    """

    async def hosts(self) -> Sequence[HostSpec]:
        """The hosts, with their slots."""
        ...
