"""What the views of one cluster receive and send, in a notebook and on a page of `nbelastic dashboard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

from nbelastic.errors import NbelasticError
from nbelastic.notebook.dashboard_contract import AnyAnswer, AnyRequest, FrameQuery
from nbelastic.notebook.dashboard_queries import answer_query, decode_query
from nbelastic.notebook.dashboard_state import DashboardState, Json
from nbelastic.protocol.status import Status

if TYPE_CHECKING:
    from nbelastic.client.cluster import Cluster

_REQUESTS = frozenset(request.__struct_config__.tag for request in get_args(AnyRequest))


class DashboardFeed:
    """The state for all views, and the answers for each.

    One thread calls `update`, a subscriber's. Any thread may call `handle`. `by`: the name of the views' requests.
    """

    def __init__(self, cluster: Cluster, by: str) -> None:
        self._cluster, self._by = cluster, by
        self._view_state = DashboardState()
        self._key_frame_requested = False  # by a view that has none
        self.newest: tuple[Json, Json]  # the last key frame, and the change since then
        self.update(cluster.status())

    def update(self, status: Status) -> bool:
        """Take in the newest status. Return whether there is something new for the views."""
        self.status = status
        if self._key_frame_requested:
            self._key_frame_requested = False
            self._view_state.send_key_frame()
        driver = self._cluster.driver  # before the events: a view drops all events if the driver is another one
        is_new = self._view_state.update(status, *self._cluster.numbered_events(), driver)
        self.newest = self._view_state.state, self._view_state.change
        return is_new

    def handle(self, content: Any, send: Callable[[Json], object]) -> None:
        """Handle a message of a view: a request of the user, or a query, whose answer goes to `send`.

        The answer of a query may come later, from another thread.
        """
        if not isinstance(content, dict):
            return
        key = content.get("id")

        def reply(answer: AnyAnswer) -> None:
            send({"reply": key, **answer})

        try:
            if "ask" in content:
                query = decode_query(content)
                if isinstance(query, FrameQuery):
                    self._key_frame_requested = True
                    self._cluster.show_again()
                answer_query(self._cluster, query, reply)
            elif str(content.get("order")) in _REQUESTS:
                self._cluster.order(content, by=self._by)
        except NbelasticError as error:
            reply({"error": str(error)})
