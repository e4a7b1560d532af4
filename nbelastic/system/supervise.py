"""Background tasks of an event loop: one that fails is reported and started again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

log = logging.getLogger("nbelastic")
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0  # seconds from a failure to the next start; they double from failure to failure

Report = Callable[[str, BaseException], object]  # what has failed, and with which error


def report_to_log(what: str, error: BaseException) -> None:
    log.error("nbelastic has a fault: %s", what, exc_info=error)


async def supervise(what: str, run: Callable[[], Awaitable[None]], report: Report) -> None:
    """Await `run()` again after each exception, until it returns. `what` names it in reports."""
    pause = FIRST_PAUSE
    while True:
        began = time.monotonic()
        try:
            await run()
        except Exception as error:  # noqa: BLE001  (a bug of ours: it must not end the task for good)
            report(f"{what} (it is started again)", error)
        else:
            return
        if time.monotonic() - began > LONGEST_PAUSE:
            pause = FIRST_PAUSE
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
