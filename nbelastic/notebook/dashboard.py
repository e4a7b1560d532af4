"""The dashboard, a widget. It sends state to its views, passes their requests to the driver, and answers their queries."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from nbelastic.notebook.dashboard_feed import DashboardFeed
from nbelastic.notebook.status_text import stable_html, stable_text
from nbelastic.notebook.widget_files import widget_text
from nbelastic.protocol.status import Status

if TYPE_CHECKING:
    from nbelastic.client.cluster import Cluster

MAX_WAITING_ANSWERS = 64


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
        self._feed = DashboardFeed(cluster, by="dashboard")
        self._answers: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING_ANSWERS)
        state, change = self._feed.newest
        super().__init__(state=state, change=change)
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

    def send_state(self, key: Any = None) -> None:
        """Send values as they are: ipywidgets would search all of them for buffers, which they do not have."""
        state = self.get_state(key=key)
        if state:
            self._send({"method": "update", "state": state, "buffer_paths": []})

    def __repr__(self) -> str:
        """Describe the cluster without an address, so that stored outputs of a notebook can be compared."""
        return stable_text(self._feed.status)

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 1, "model_id": self.model_id}
        return {
            "application/vnd.jupyter.widget-view+json": view,
            "text/html": stable_html(self._feed.status),
            "text/plain": stable_text(self._feed.status),
        }

    def _update(self, status: Status) -> None:
        """Run in the subscribers' thread, the only one that writes."""
        while self._answers:
            self.send(self._answers.popleft())
        if self._feed.update(status):
            with self.hold_sync():  # so that a key frame never arrives with the change of another one
                self.state, self.change = self._feed.newest

    def _handle_message(self, _: object, content: Any, __: object) -> None:
        def send(answer: dict[str, Any]) -> None:
            self._answers.append(answer)
            self._cluster.show_again()

        self._feed.handle(content, send)

    def _handle_clicks_during_cells(self) -> None:
        """Have clicks handled while a cell runs.

        JupyterLab ≥ 4.4 sends them to a subshell. ipykernel 7.4.0 passes a comm's message to the shell that last sent through
        that comm. Clicks would then wait for the cell; this keeps them in their subshell. Other versions lack the attribute
        and do not need this.
        """
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda _, default: default
