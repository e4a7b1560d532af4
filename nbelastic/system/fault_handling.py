"""Exceptions in nbelastic's own code: report them, and restart the background tasks that raised them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from nbelastic.system.backoff import Backoff

log = logging.getLogger("nbelastic")
T = TypeVar("T")
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0  # seconds before a restart; the pause doubles with each exception
HEALTHY_RUN = 30.0  # seconds; after such a run the pause is the first one again

Report = Callable[[str, BaseException], object]  # arguments: what has failed, and the error


def report_to_log(what: str, error: BaseException) -> None:
    log.error("nbelastic has a fault: %s", what, exc_info=error)


async def supervise(what: str, run: Callable[[], Awaitable[None]], report: Report) -> None:
    """Await `run()`, again after each exception, until it returns. Reports name it `what`."""
    backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
    while True:
        began = time.monotonic()
        try:
            await run()
        except Exception as error:  # noqa: BLE001  (a bug of nbelastic must not end the task for good)
            report(f"{what} (it is started again)", error)
        else:
            return
        if time.monotonic() - began > HEALTHY_RUN:
            backoff.reset()
        await asyncio.sleep(backoff.next())


def guarded(call: Callable[..., T], *args: Any) -> T | None:
    """Call `call(*args)` and return its result; log an exception and return None."""
    try:
        return call(*args)
    except Exception:
        log.exception("%s failed", getattr(call, "__qualname__", call))
        return None
