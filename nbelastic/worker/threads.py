"""Threads for calls that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty
from typing import TypeVar

from nbelastic.system.signal_safe_queue import SignalSafeQueue

T = TypeVar("T")


def run_in_thread(task: Callable[[], T]) -> Future[T]:
    """Run `task` in a new thread, which does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(task())
        except BaseException as error:  # noqa: BLE001  (the caller of `result` gets it)
            future.set_exception(error)

    threading.Thread(target=run, name="nbelastic-task", daemon=True).start()
    return future


def result_of(task: Future[T], check: Callable[[], object], period: float) -> T:
    """The result of `task`; raises what it raises. Until it is done, `check()` is called every `period` seconds and may raise.

    `concurrent.futures.wait` takes three times the CPU time, which counts when many workers wait on few processors.
    """
    done: SignalSafeQueue[Future[T]] = SignalSafeQueue()
    task.add_done_callback(done.put)
    while True:
        try:
            return done.get(period).result()
        except Empty:
            check()
