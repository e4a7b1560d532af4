"""Up to when a reader has read what arrives, while more messages wait than it reads at a time."""

from __future__ import annotations

from collections import Counter


class Backlog:
    """Of a socket with many connections, whose queues of at most `queue` messages ZeroMQ reads in turn. Times are monotonic.

    The reader calls `begin` when messages may wait, `note_read` for each one it reads, and `end` when none is left.
    """

    def __init__(self, queue: int) -> None:
        self._queue = queue
        self._emptied_at = 0.0  # when none waited last
        self._since: float | None = None  # since when messages may wait unread; None: none waits
        self._round_began = 0.0
        self._read: Counter[bytes] = Counter()  # messages of each connection since then

    def read_up_to(self, now: float) -> float:
        """All messages that had arrived by then are read."""
        return now if self._since is None else self._since

    def begin(self) -> None:
        if self._since is None:
            self._since = self._round_began = self._emptied_at

    def note_read(self, connection: bytes, now: float) -> None:
        """After a whole queue of one connection, all that waited in those of others when the round began is read."""
        self._read[connection] += 1
        if self._read[connection] >= self._queue:
            self._since, self._round_began = self._round_began, now
            self._read.clear()

    def end(self, now: float) -> None:
        self._since, self._emptied_at = None, now
        self._read.clear()
