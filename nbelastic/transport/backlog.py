"""Up to when a reader has read what arrives, while more messages wait than it reads at a time."""

from __future__ import annotations

import asyncio
from collections import Counter

TURNS = 3  # messages of one connection, until each other one was read or had none: one with new messages may overtake it once


async def read_turn() -> None:
    """Let the server notice messages that came during a long turn of the loop, and read some: a check may be due first."""
    for _ in range(2):
        await asyncio.sleep(0)


class Unread:
    """Whether messages may wait that had arrived by some time (monotonic). ZeroMQ reads connections in turn.

    After `turns` messages of one connection, each other one was read as often, or has no message left.
    """

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._emptied_at = 0.0  # when none waited last
        self._since: float | None = None  # since when messages may wait; None: none waits
        self._round_began = 0.0
        self._read: Counter[bytes] = Counter()  # messages of each connection since then
        self._answer = 0.0

    def read_up_to(self, now: float) -> float:
        """Up to this time nothing is unread that ZeroMQ had received. It never goes back."""
        self._answer = max(self._answer, now if self._since is None else self._since)
        return self._answer

    def begin(self) -> None:
        if self._since is None:
            self._since = self._round_began = self._emptied_at

    def note_read(self, connection: bytes, now: float) -> None:
        self._read[connection] += 1
        if self._read[connection] >= self._turns:
            self._since, self._round_began = self._round_began, now
            self._read.clear()

    def end(self, now: float) -> None:
        self._since, self._emptied_at = None, now
        self._read.clear()


class Backlog:
    """Of a socket whose connections have queues of at most `queue` messages.

    `messages`: up to when all messages are read. `connections`: up to when a connection would have been read if it had a
    message; this is known sooner. The reader calls `begin` when messages may wait, `note_read` for each that it reads, and
    `end` when none is left.
    """

    def __init__(self, queue: int) -> None:
        self.messages, self.connections = Unread(queue), Unread(TURNS)

    def begin(self) -> None:
        self.messages.begin()
        self.connections.begin()

    def note_read(self, connection: bytes, now: float) -> None:
        self.messages.note_read(connection, now)
        self.connections.note_read(connection, now)

    def end(self, now: float) -> None:
        self.messages.end(now)
        self.connections.end(now)
