"""The live view: one widget a cluster. State goes down, orders and questions come up; it decides nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from nbelastic.errors import NbelasticError
from nbelastic.notebook.dashboard_queries import answer
from nbelastic.notebook.dashboard_state import Frames
from nbelastic.notebook.status_text import settled_html, settled_text
from nbelastic.protocol.status import Status

if TYPE_CHECKING:
    from nbelastic.client.cluster import Cluster

UNANSWERED = 64  # answers that wait to be sent, at most
_ORDERS = ("add_host", "remove_host", "restart", "scale", "stop_job", "stop")


def _asset(name: str) -> str:
    """A wheel carries the widget's files under static/; a checkout has them where they are written."""
    here = Path(__file__).parent
    packed = here / "static" / name
    path = packed if packed.exists() else here.parents[1] / "widgets" / name
    return path.read_text(encoding="utf-8")


class Dashboard(anywidget.AnyWidget):  # type: ignore[misc]  # anywidget carries no types here
    """A live view of `cluster`. Show it as often as you like: all views share one stream of updates.

    One thread writes: `state`, a key frame, or `change`, what has changed since, at most 4 times a second and only when
    there is something new; and the answers to what views ask.
    """

    _esm = _asset("dashboard.js")
    _css = _asset("dashboard.css")
    state = traitlets.Dict().tag(sync=True)
    change = traitlets.Dict().tag(sync=True)

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._unsubscribe: Callable[[], None] | None = None
        self._status = cluster.status()
        self._frames = Frames()
        self._missed = False  # a view has no key frame
        self._frames.show(self._status, *cluster.numbered_events())
        self._answers: deque[dict[str, Any]] = deque(maxlen=UNANSWERED)
        super().__init__(state=self._frames.state, change=self._frames.change)
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
        """Called in the watchers' thread, the only one that writes."""
        while self._answers:
            self.send(self._answers.popleft())
        self._status = status
        if self._missed:
            self._missed = False
            self._frames.begin_again()
        if self._frames.show(status, *self._cluster.numbered_events()):
            with self.hold_sync():  # a key frame never comes with the change of another one
                self.state = self._frames.state
                self.change = self._frames.change

    def _take(self, _: object, content: Any, __: object) -> None:
        """A person's order, straight into the driver's inbox, or a view's question."""
        if not isinstance(content, dict):
            return
        key = content.get("id")

        def reply(said: dict[str, Any]) -> None:
            self._answers.append({"reply": key, **said})
            self._cluster.show_again()

        if content.get("ask") == "frame":
            self._missed = True
            reply({})
        elif "ask" in content:
            answer(self._cluster, content, reply)
        elif str(content.get("order")) in _ORDERS:
            try:
                self._cluster.order(content, by="dashboard")
            except NbelasticError as error:
                reply({"error": str(error)})

    def _answer_at_once(self) -> None:
        """Have clicks handled while a cell runs.

        ipykernel 7.4.0 hands a message of a comm to the shell which last sent through it, so clicks would wait for the
        cell. JupyterLab ≥ 4.4 sends them to a shell of their own; this keeps them there. Other versions have no such
        attribute, and need nothing.
        """
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda _, default: default
