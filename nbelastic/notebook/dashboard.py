"""The live view: one widget a cluster, one trait down, orders up. It shows and sends; it decides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import msgspec
import traitlets

from nbelastic.driver.status import EventRecord, Status
from nbelastic.notebook.snapshot import settled_html, settled_text

if TYPE_CHECKING:
    from nbelastic.driver.cluster import Cluster

EVENTS = 24  # how many of the last events travel with each update
_ORDERS = frozenset({"add_host", "remove_host", "scale", "stop_job", "stop"})
_UNSEEN = ("address", "log_dir")  # of hosts and workers: the dashboard has no use for them


def _asset(name: str) -> str:
    """A wheel carries the widget's files under static/; a checkout has them where they are written."""
    here = Path(__file__).parent
    packed = here / "static" / name
    path = packed if packed.exists() else here.parents[1] / "widgets" / name
    return path.read_text(encoding="utf-8")


class Dashboard(anywidget.AnyWidget):  # type: ignore[misc]  # anywidget carries no types here
    """A live view of `cluster`. Show it as often as you like: all views share one stream of updates.

    The driver's thread alone writes `state`, at most 4 times a second and only when something has changed.
    """

    _esm = _asset("dashboard.js")
    _css = _asset("dashboard.css")
    state = traitlets.Dict().tag(sync=True)

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._unsubscribe: Callable[[], None] | None = None
        self._status = cluster.status()
        self._tail = Tail()
        super().__init__(state=self._state())
        self._answer_at_once()
        self.observe(lambda _: self._answer_at_once(), "comm")
        self.on_msg(self._take)
        self._unsubscribe = cluster.subscribe(self._show)

    def close(self) -> None:
        """No more updates, here and in every view."""
        unsubscribe, self._unsubscribe = self._unsubscribe, None
        if unsubscribe is not None:
            unsubscribe()
        super().close()

    def __repr__(self) -> str:
        """Without an address, so that a checked notebook may store it."""
        return settled_text(self._status)

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 1, "model_id": self.model_id}
        return {
            "application/vnd.jupyter.widget-view+json": view,
            "text/html": settled_html(self._status),
            "text/plain": settled_text(self._status),
        }

    def _show(self, status: Status) -> None:
        """Called in the driver's thread."""
        self._status = status
        self.state = self._state()

    def _state(self) -> dict[str, Any]:
        return {**as_json(self._status), "events": self._tail.look(self._cluster.events)}

    def _take(self, _: object, content: Any, __: object) -> None:
        """An order of a person, straight into the driver's inbox; a refusal comes back as an event."""
        if isinstance(content, dict) and content.get("order") in _ORDERS:
            self._cluster.order(content, by="dashboard")

    def _answer_at_once(self) -> None:
        """Have clicks handled while a cell runs.

        ipykernel 7.4.0 hands a message of a comm to the shell which last sent through it, so clicks would wait for the
        cell. JupyterLab ≥ 4.4 sends them to a shell of their own; this keeps them there. Other versions have no such
        attribute, and need nothing.
        """
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda _, default: default


class Tail:
    """The last events, each with its number since the start. The cluster's own list forgets its oldest."""

    def __init__(self) -> None:
        self._count = 0
        self._last: EventRecord | None = None

    def look(self, events: Sequence[EventRecord]) -> list[dict[str, Any]]:
        """The last of `events` as plain JSON; their numbers `n` go on from look to look."""
        new = 0
        for event in reversed(events):
            if event is self._last:
                break
            new += 1
        self._count += new
        self._last = events[-1] if events else None
        shown = events[-EVENTS:]
        first = self._count - len(shown) + 1
        return [{**msgspec.to_builtins(event), "n": n} for n, event in enumerate(shown, first)]


def as_json(status: Status) -> dict[str, Any]:
    """What of a status the widget gets, as plain JSON."""
    state: dict[str, Any] = msgspec.to_builtins(status)
    for row in (*state["hosts"], *state["workers"]):
        for name in _UNSEEN:
            row.pop(name, None)
    state["report"] = {name: _finite(value) for name, value in status.report.items()}
    return state


def _finite(value: float) -> float | str:
    """JSON has no NaN, and a loss that became one is worth seeing."""
    return value if math.isfinite(value) else str(value)
