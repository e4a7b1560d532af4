"""The dashboard, a widget. It sends state to its views, passes their requests to the driver, and answers their queries."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import anywidget
import traitlets

from nbelastic.errors import NbelasticError
from nbelastic.notebook.dashboard_contract import AnyAnswer, AnyRequest, FrameQuery
from nbelastic.notebook.dashboard_queries import answer_query, decode_query
from nbelastic.notebook.dashboard_state import DashboardState
from nbelastic.notebook.status_text import stable_html, stable_text
from nbelastic.notebook.widget_files import widget_text
from nbelastic.protocol.status import Status

if TYPE_CHECKING:
    from nbelastic.client.cluster import Cluster

MAX_WAITING_ANSWERS = 64
_REQUESTS = frozenset(request.__struct_config__.tag for request in get_args(AnyRequest))


class Dashboard(anywidget.AnyWidget):  # type: ignore[misc]  # anywidget carries no types here
    """A live view of `cluster`. It can be shown several times: all views share one stream of updates.

    One thread writes the traits and sends the answers to queries. `state` is a key frame, `change` the changes since then.
    They are written at most 4 times per second, and only if something has changed.
    """

    _esm = widget_text("dashboard.js")
    _css = widget_text("dashboard.css")
    state = traitlets.Dict().tag(sync=True)
    change = traitlets.Dict().tag(sync=True)

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._unsubscribe: Callable[[], None] | None = None
        self._status = cluster.status()
        self._view_state = DashboardState()
        self._key_frame_requested = False  # by a view that has none
        self._view_state.update(self._status, *cluster.numbered_events())
        self._answers: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING_ANSWERS)
        super().__init__(state=self._view_state.state, change=self._view_state.change)
        self._handle_clicks_during_cells()
        self.observe(lambda _: self._handle_clicks_during_cells(), "comm")
        self.on_msg(self._handle_message)
        self._unsubscribe = cluster.subscribe(self._update)

    def close(self) -> None:
        """End the updates of all views."""
        unsubscribe, self._unsubscribe = self._unsubscribe, None
        if unsubscribe is not None:
            unsubscribe()
        super().close()

    def __repr__(self) -> str:
        """Describe the cluster without an address, so that stored outputs of a notebook can be compared."""
        return stable_text(self._status)

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 1, "model_id": self.model_id}
        return {
            "application/vnd.jupyter.widget-view+json": view,
            "text/html": stable_html(self._status),
            "text/plain": stable_text(self._status),
        }

    def _update(self, status: Status) -> None:
        """Run in the subscribers' thread, the only one that writes."""
        while self._answers:
            self.send(self._answers.popleft())
        self._status = status
        if self._key_frame_requested:
            self._key_frame_requested = False
            self._view_state.send_key_frame()
        if self._view_state.update(status, *self._cluster.numbered_events()):
            with self.hold_sync():  # so that a key frame never arrives with the change of another one
                self.state = self._view_state.state
                self.change = self._view_state.change

    def _handle_message(self, _: object, content: Any, __: object) -> None:
        """Handle a message of a view: a request of the user, or a query."""
        if not isinstance(content, dict):
            return
        key = content.get("id")

        def reply(answer: AnyAnswer) -> None:
            self._answers.append({"reply": key, **answer})
            self._cluster.show_again()

        try:
            if "ask" in content:
                query = decode_query(content)
                self._key_frame_requested |= isinstance(query, FrameQuery)
                answer_query(self._cluster, query, reply)
            elif str(content.get("order")) in _REQUESTS:
                self._cluster.order(content, by="dashboard")
        except NbelasticError as error:
            reply({"error": str(error)})

    def _handle_clicks_during_cells(self) -> None:
        """Have clicks handled while a cell runs.

        JupyterLab ≥ 4.4 sends them to a subshell. ipykernel 7.4.0 passes a comm's message to the shell that last sent through
        that comm. Clicks would then wait for the cell; this keeps them in their subshell. Other versions lack the attribute
        and do not need this.
        """
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda _, default: default
