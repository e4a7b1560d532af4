"""Unexpected errors in the driver's own code: they are reported, and never end a training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from nbelastic.core import commands as cmd
from nbelastic.protocol import events as ev

T = TypeVar("T")
MAX_REPORTS = 100  # different errors
log = logging.getLogger("nbelastic")


class InternalErrors:
    """Lives in the driver's thread; `decision_failure` may be read from any.

    `decision_failure`: why the driver no longer makes decisions; empty while it makes them.
    """

    def __init__(self, cluster_name: str, record: Callable[[cmd.Record], None]) -> None:
        self._cluster_name, self._record = cluster_name, record
        self._reported: set[str] = set()
        self.decision_failure = ""

    def report(self, what: str, error: BaseException) -> None:
        """Report an error that affects only `what`: as an event, and once on stderr with its traceback."""
        text = f"{what}: {_in_one_line(error)}"
        if text not in self._reported and len(self._reported) < MAX_REPORTS:
            self._reported.add(text)
            log.error("nbelastic's driver has an internal error: %s", text, exc_info=error)
            self._record(cmd.Record("driver-error", text))

    def report_decision_failure(self, event: ev.Event, error: BaseException) -> None:
        """Report an error after which the cluster state may be wrong."""
        self.decision_failure = (
            f"the driver of {self._cluster_name!r} has failed and makes no more decisions ({_in_one_line(error)}, at "
            f"{type(event).__name__}): running jobs continue; stop the cluster, or detach from a kept one and attach again"
        )
        log.error("%s", self.decision_failure, exc_info=error)
        self._record(cmd.Record("driver-failed", self.decision_failure))

    def on_callback_error(self, _: object, context: dict[str, Any]) -> None:
        """The event loop's exception handler: for an error in a callback, or in a task that is not awaited."""
        error = context.get("exception")
        if error is not None:
            self.report(str(context.get("message", "a callback")), error)


def call_each(functions: Iterable[Callable[[], object]]) -> Exception | None:
    """Call all of them even if one fails, because one may be an abort. Returns the first error."""
    first = None
    for function in functions:
        try:
            function()
        except Exception as error:  # noqa: BLE001  (the caller reports it)
            first = first or error
    return first


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
