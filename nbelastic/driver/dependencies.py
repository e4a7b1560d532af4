"""What connects the driver to the outside: the message server, launchers, ipyparallel's controller and the clock.

Tests inject fakes, and run a whole driver without a process, a socket or a second of waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from nbelastic.driver.clock import Clock
from nbelastic.ipp.supervisor import Supervisor
from nbelastic.protocol import messages
from nbelastic.protocol.ids import HostSpec
from nbelastic.provision.host_location import locate
from nbelastic.provision.launchers import Agent, agent_for
from nbelastic.transport.backlog import Backlog
from nbelastic.transport.server import Server

# Starts a background task that is started again whenever it fails. The text names it in error reports.
StartTask = Callable[[str, Callable[[], Awaitable[None]]], asyncio.Task[None]]


class MessageServer(Protocol):
    """The driver's end of the connections: see `transport.server.Server`."""

    heard_at: dict[str, float]
    backlog: Backlog
    address: str

    async def start(self, interface: str = ..., port: int = ...) -> None: ...

    async def stop(self) -> None: ...

    def send(self, peer: str, message: messages.Message) -> None: ...

    def send_to_all(self, peers: Iterable[str], message: messages.Message) -> None: ...

    def has_acknowledged(self, peer: str) -> bool: ...

    def forget(self, peer: str) -> None: ...


class Controller(Protocol):
    """ipyparallel's controller: see `ipp.supervisor.Supervisor`."""

    connection: str
    process: str

    async def start(self) -> None: ...

    async def attach(self) -> None: ...

    async def stop(self) -> None: ...

    def information(self, kind: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Dependencies:
    """Factories and functions. Each is called like its default."""

    server: Callable[..., MessageServer] = Server
    locate: Callable[[HostSpec, str], Awaitable[tuple[str, str]]] = locate
    agent_for: Callable[..., Agent] = agent_for
    controller: Callable[..., Controller] = Supervisor
    clock: Callable[[float], Clock] = Clock


REAL = Dependencies()
