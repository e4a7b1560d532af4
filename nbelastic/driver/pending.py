"""Answers that are pending: each is a future and a predicate, which is asked after every event until it has a result."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from nbelastic.core.state import ClusterState
from nbelastic.protocol import events as ev
from nbelastic.system.futures import settle

T = TypeVar("T")
Predicate = Callable[[ClusterState], T | None]


class Pending:
    """Lives in the driver's thread.

    `cluster()` returns the present one, `post(event)` puts an event into the driver's inbox, `error()` returns what futures
    fail with that can no longer be resolved, and `publish()` sends clients what has changed.
    """

    def __init__(
        self,
        cluster: Callable[[], ClusterState],
        post: Callable[[ev.Event], None],
        error: Callable[[], BaseException],
        publish: Callable[[], None],
    ) -> None:
        self._cluster, self._post, self._error, self._publish = cluster, post, error, publish
        self._waiting: list[tuple[Predicate[Any], Future[Any]]] = []
        self._posted: list[tuple[ev.Event, Predicate[Any], Future[Any]]] = []  # wait from their events' decisions on
        self._tracked: set[Future[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        """How many predicates are asked after each event."""
        return len(self._waiting)

    def track(self, future: Future[T]) -> Future[T]:
        """Fail this future if the driver stops before it is resolved."""
        self._tracked.add(future)
        future.add_done_callback(self._tracked.discard)
        if self._closed:
            settle(future.set_exception, self._error())
        return future

    def resolve(self, future: Future[T], predicate: Predicate[T]) -> None:
        """Resolve `future` with the first result of `predicate(world)` that is not None."""
        self._waiting.append((predicate, future))
        self.check_and_publish()

    def resolve_after(self, event: ev.Event, future: Future[T], predicate: Predicate[T]) -> None:
        """Post this event. When it has been decided on, `resolve` the future."""
        self._posted.append((event, predicate, self.track(future)))
        self._post(event)

    def decided(self, event: ev.Event) -> None:
        """The driver has decided on this event."""
        for posted in [posted for posted in self._posted if posted[0] is event]:
            self._posted.remove(posted)
            self._waiting.append(posted[1:])

    def check(self) -> None:
        """Ask each predicate."""
        for predicate, future in list(self._waiting):
            if future.done():  # the caller has given up
                continue
            try:
                result = predicate(self._cluster())
            except Exception as error:  # noqa: BLE001  (it is the caller's)
                settle(future.set_exception, error)
            else:
                if result is not None:
                    settle(future.set_result, result)
        self._waiting = [entry for entry in self._waiting if not entry[1].done()]

    def check_and_publish(self) -> None:
        """Something beside the world has changed."""
        self.check()
        self._publish()

    def fail_all(self, *, close: bool = False) -> None:
        """Fail all futures that are tracked; with `close` also those that will be."""
        self._closed = self._closed or close
        for future in list(self._tracked):
            settle(future.set_exception, self._error())
