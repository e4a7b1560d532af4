"""Calls subscribers after changes of a cluster's status, from one thread and at most four times per second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from nbelastic.protocol.status import Status

log = logging.getLogger("nbelastic")

INTERVAL = 0.25  # seconds


class Subscriptions:
    """The callbacks of a cluster's subscribers.

    `notify()` returns at once and may be called from any thread. The callbacks run in one thread, never in the driver's;
    it lives as long as there are callbacks. A callback that raises is called again at the next change, which it may be
    able to show. Of several errors in succession, the first is logged.
    """

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status
        self._callbacks: list[Callable[[Status], object]] = []
        self._failing: set[Callable[[Status], object]] = set()  # callbacks that raised when they were last called
        self._notified = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, callback: Callable[[Status], object]) -> Callable[[], None]:
        """Call `callback` soon, and after every change. Return a function that ends that."""
        is_first, self._callbacks = not self._callbacks, [*self._callbacks, callback]
        # A thread that still lives may have seen that there was no callback, and end.
        if is_first or self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="nbelastic-subscribers", daemon=True)
            self._thread.start()
        self._notified.set()
        return lambda: self._remove(callback)

    def has_any(self) -> bool:
        """Whether anything, such as a dashboard, shows the status."""
        return bool(self._callbacks)

    def notify(self) -> None:
        """Have the callbacks called soon."""
        self._notified.set()

    def _remove(self, callback: Callable[[Status], object]) -> None:
        self._callbacks = [other for other in self._callbacks if other is not callback]
        self._failing.discard(callback)
        self._notified.set()

    def _run(self) -> None:
        pause = threading.Event()
        while self._callbacks and self._thread is threading.current_thread():
            self._notified.wait()
            self._notified.clear()
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
