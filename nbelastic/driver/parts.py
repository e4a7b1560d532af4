"""What the driver reaches the outside by: the link, agents, ipyparallel's engines and the clock.

The decisions need none of them. A test gives fakes, and drives a whole driver without a process, a socket or a second of waiting.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nbelastic.core import messages as m
from nbelastic.core import wire
from nbelastic.driver.clock import Clock
from nbelastic.driver.launchers import Agent, agent_for, locate
from nbelastic.link import Hub

if TYPE_CHECKING:
    from nbelastic.driver.calls import Call
    from nbelastic.driver.engines import Outcome
    from nbelastic.driver.run import Cell


class Transport(Protocol):
    """The driver's end of the link: see `link.Hub`."""

    heard_at: dict[str, float]
    address: str

    async def start(self, interface: str = ..., port: int = ...) -> None: ...

    async def stop(self) -> None: ...

    def send(self, peer: str, message: wire.Message) -> None: ...

    def send_to_all(self, peers: Iterable[str], message: wire.Message) -> None: ...

    def forget(self, peer: str) -> None: ...


class EngineClient(Protocol):
    """What runs code on engines, by their uuids: see `engines.Engines`."""

    connection: str
    client: Any

    @property
    def process(self) -> str: ...

    async def start(self) -> None: ...

    async def attach(self, process: str = "") -> None: ...

    async def detach(self) -> None: ...

    async def stop(self) -> None: ...

    def knows(self, uuid: str) -> bool: ...

    def forget(self, uuid: str) -> None: ...

    def busy(self, uuid: str, job: str) -> None: ...

    def execute(self, uuid: str, source: str, done: Callable[[Any], None]) -> None: ...

    def run_cell(self, uuid: str, job: str, log_dir: str, cell: Cell, done: Callable[[Outcome], None]) -> None: ...

    def run_function(self, uuid: str, job: str, log_dir: str, call: Call, done: Callable[[Outcome], None]) -> None: ...

    def await_outcome(self, uuid: str, job: str, done: Callable[[Outcome], None]) -> None: ...


def _engines(*arguments: Any, **options: Any) -> EngineClient:
    from nbelastic.driver.engines import Engines  # it imports ipyparallel, which takes its time

    return Engines(*arguments, **options)


@dataclass(frozen=True)
class Parts:
    """Each is called as the class or function that it is by default."""

    transport: Callable[..., Transport] = Hub
    locate: Callable[[m.HostSpec, str], Awaitable[tuple[str, str]]] = locate
    agent_for: Callable[..., Agent] = agent_for
    engines: Callable[..., EngineClient] = _engines
    clock: Callable[[float], Clock] = Clock


REAL = Parts()
