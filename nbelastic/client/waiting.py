"""Waits for the result of a future, with a timeout, and open to Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

from nbelastic.errors import WaitTimeoutError
from nbelastic.system.argument_types import check_timeout

T = TypeVar("T")
ANSWER_TIMEOUT = 60.0  # seconds for a driver's answer to a request that it can answer at once
_SLICE = 0.1  # seconds after which a wait is interrupted for Ctrl-C


def wait_for_result(
    future: Future[T],
    timeout: float | None,
    describe: Callable[[], str],
    meanwhile: Callable[[], object] = lambda: None,
) -> T:
    """Return the future's result or raise its error. The wait has slices, so that Ctrl-C works; `meanwhile` is called after each.

    After `timeout` seconds WaitTimeoutError names, by `describe`, what the wait was for. UsageError if it is not a number.
    """
    check_timeout(timeout)
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        slice_length = _SLICE if end is None else min(_SLICE, end - time.monotonic())
        futures.wait([future], max(0.0, slice_length))
        if future.done():
            return future.result()
        if end is not None and time.monotonic() >= end:
            raise WaitTimeoutError(f"{timeout:g} s were not enough for {describe()}")
        meanwhile()
