"""A queue whose waits end in time, whatever signals come."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class SignalSafeQueue(Generic[T]):
    """For one reading thread; any thread and any signal handler may put items.

    Before Python 3.13, `queue.SimpleQueue` may wait forever in spite of a timeout: if a signal comes as the time ends, the
    time that is left is negative, which its lock takes for no limit. A handler that raises may leave `queue.Queue` locked.
    """

    def __init__(self) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()
        self._news = threading.Lock()  # unlocked by a put, locked by a wait
        self._news.acquire()

    def put(self, item: T) -> None:
        self._items.put(item)
        with suppress(RuntimeError):  # an earlier item has unlocked it
            self._news.release()

    def get(self, timeout: float = 0.0) -> T:
        """The oldest item. queue.Empty if none comes within `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            try:
                return self._items.get_nowait()
            except Empty:
                left = end - time.monotonic()
                if left <= 0:
                    raise
            self._news.acquire(timeout=left)

    def empty(self) -> bool:
        return self._items.empty()
