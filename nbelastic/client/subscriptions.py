"""Those who want to see changes: told from a thread of their own, at most four times a second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from nbelastic.protocol.status import Status

log = logging.getLogger("nbelastic")

INTERVAL = 0.25  # seconds


class Watchers:
    """`changed()` is cheap and may be called from any thread; the callbacks run in one thread, never in the driver's.

    The thread lives as long as somebody looks on. A callback that raises is called again at the next change: what it could
    not show may be gone by then. The first error of a row is logged.
    """

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status
        self._callbacks: list[Callable[[Status], object]] = []
        self._failing: set[Callable[[Status], object]] = set()  # raised when they were called last
        self._news = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, callback: Callable[[Status], object]) -> Callable[[], None]:
        """Call it soon, and after every change; returns what ends that."""
        self._callbacks = [*self._callbacks, callback]
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._tell, name="nbelastic-watchers", daemon=True)
            self._thread.start()
        self._news.set()
        return lambda: self._remove(callback)

    def changed(self) -> None:
        self._news.set()

    def _remove(self, callback: Callable[[Status], object]) -> None:
        self._callbacks = [other for other in self._callbacks if other is not callback]
        self._failing.discard(callback)
        self._news.set()

    def _tell(self) -> None:
        pause = threading.Event()
        while self._callbacks:
            self._news.wait()
            self._news.clear()
            status = self._status()
            for callback in self._callbacks:
                try:
                    callback(status)
                except Exception:
                    if callback not in self._failing:
                        log.exception("a subscriber of the cluster's status raised; it is called again at each change")
                        self._failing.add(callback)
                else:
                    self._failing.discard(callback)
            pause.wait(INTERVAL)
