"""Unexpected errors in the driver's own code: they are reported, and never end a training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from nbelastic.core import commands as cmd
from nbelastic.protocol import events as ev

T = TypeVar("T")
MOST = 100  # different errors that are reported
log = logging.getLogger("nbelastic")


class Faults:
    """Lives in the driver's thread; `decides_not` may be read from any.

    `decides_not`: why the driver decides nothing any more; empty while it decides.
    """

    def __init__(self, name: str, record: Callable[[cmd.Record], None]) -> None:
        self._name, self._record = name, record
        self._reported: set[str] = set()
        self.decides_not = ""

    def report(self, what: str, error: BaseException) -> None:
        """Report an error that costs one thing: an event, and once on stderr with its traceback."""
        text = f"{what}: {_in_one_line(error)}"
        if text not in self._reported and len(self._reported) < MOST:
            self._reported.add(text)
            log.error("nbelastic's driver has a fault: %s", text, exc_info=error)
            self._record(cmd.Record("driver-error", text))

    def stop_deciding(self, event: ev.Event, error: BaseException) -> None:
        """Report an error after which the state of the cluster may be wrong."""
        self.decides_not = (
            f"the driver of {self._name!r} has a fault and decides nothing any more ({_in_one_line(error)}, at "
            f"{type(event).__name__}): what trains goes on; stop the cluster, or detach from a kept one and attach again"
        )
        log.error("%s", self.decides_not, exc_info=error)
        self._record(cmd.Record("driver-failed", self.decides_not))

    def in_callback(self, _: object, context: dict[str, Any]) -> None:
        """The event loop's handler: an error in a callback, or in a task that nobody waits for."""
        error = context.get("exception")
        if error is not None:
            self.report(str(context.get("message", "a callback")), error)


def try_each(acts: Iterable[Callable[[], object]]) -> Exception | None:
    """Do all of them, whichever fails: an abort may be among them. The first error, if there was one."""
    first = None
    for act in acts:
        try:
            act()
        except Exception as error:  # noqa: BLE001  (the caller reports it)
            first = first or error
    return first


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
