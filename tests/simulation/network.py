"""The network of a simulation: machines, delays, and cuts in one direction or both.

The link numbers its messages and repeats lost ones (`transport.delivery`, which has tests of its own), so each message arrives
once and in order. What a cut holds back arrives after it.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from tests.simulation.clock import Clock

DRIVER = "driver"
HEARTBEAT = 1.0  # seconds between two ticks of driver, agents and workers
NOTICED = 12.0  # seconds until ZeroMQ notices a cut
LONGEST_PAUSE = 1.0  # seconds after a cut in which a message is repeated


class Channel:
    """Messages from one end to another, in order. `close()` drops those that are on their way."""

    def __init__(self, network: Network, source: str, target: str) -> None:
        self._network, self.path = network, (source, target)
        self._waiting: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._arrives = 0.0  # when the last message arrives
        self._is_open = True

    def send(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._waiting.append((call, arguments))
        network = self._network
        self._arrives = max(self._arrives, network.clock.now + network.delay(self.path))
        network.clock.at(self._arrives, self._deliver)

    def _deliver(self) -> None:
        if self.path in self._network.cut:
            self._network.held[self.path].append(self)
        elif self._is_open and self._waiting:
            call, arguments = self._waiting.popleft()
            call(*arguments)

    def resume(self) -> None:
        """The cut has ended: the next message that it held back arrives."""
        self._network.clock.after(self._network.rng.uniform(0.0, LONGEST_PAUSE), self._deliver_all)

    def _deliver_all(self) -> None:
        if self.path in self._network.cut:  # there is another cut by now
            self._network.held[self.path].append(self)
        while self._is_open and self._waiting and self.path not in self._network.cut:
            call, arguments = self._waiting.popleft()
            call(*arguments)

    def lose_some(self) -> None:
        """The sender has died: what it has sent is lost from some message on; all of it behind a cut, as it repeats nothing."""
        cut = self.path in self._network.cut
        kept = 0 if cut else self._network.rng.randrange(len(self._waiting) + 1)
        while len(self._waiting) > kept:
            self._waiting.pop()

    def close(self) -> None:
        self._is_open = False
        self._waiting.clear()


class Network:
    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock, self.rng = clock, rng
        self.cut: set[tuple[str, str]] = set()  # from a machine, to a machine
        self.cut_at: dict[tuple[str, str], float] = {}
        self.slow: dict[tuple[str, str], float] = {}  # seconds of delay, where it is not short
        self.held: defaultdict[tuple[str, str], list[Channel]] = defaultdict(list)

    def delay(self, path: tuple[str, str]) -> float:
        return self.rng.expovariate(1.0 / self.slow.get(path, 0.002))

    def sever(self, source: str, target: str) -> None:
        if (source, target) not in self.cut:
            self.cut.add((source, target))
            self.cut_at[source, target] = self.clock.now

    def mend(self, source: str, target: str) -> None:
        self.cut.discard((source, target))
        for channel in self.held.pop((source, target), ()):
            channel.resume()

    def joined(self, one: str, other: str) -> bool:
        """Whether packets pass both ways."""
        return (one, other) not in self.cut and (other, one) not in self.cut

    def parts(self, machines: set[str]) -> bool:
        """Whether there is a cut between two of these."""
        return any(source in machines and target in machines for source, target in self.cut)
