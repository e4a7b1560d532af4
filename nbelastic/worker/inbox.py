"""The driver's messages for the main thread."""

from __future__ import annotations

import queue
import threading

from nbelastic.system.signal_safe_queue import SignalSafeQueue
from nbelastic.worker.protocol import News


class Inbox:
    """The link thread posts; the main thread reads at commits and between generations.

    A commit reads `attention`: there are messages to read, or a promise to keep. `lock` is held while a commit is
    counted, and while a message is handled: a worker cannot promise to stop at a commit and pass it at the same moment.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.attention = False
        self._queue: SignalSafeQueue[News] = SignalSafeQueue()

    def post(self, news: News) -> None:
        self._queue.put(news)
        self.attention = True

    def take(self, timeout: float = 0.0) -> News | None:
        """The oldest message, or None if none comes within `timeout` seconds."""
        try:
            return self._queue.get(timeout)
        except queue.Empty:
            return None

    def is_empty(self) -> bool:
        return self._queue.empty()

    def clear(self) -> None:
        """Drop all messages: they concern an earlier program."""
        self._queue = SignalSafeQueue()
