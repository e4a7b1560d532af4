"""Pending answers: each is a future and a predicate, which is evaluated after every event until it has a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from nbelastic.core.state import ClusterState
from nbelastic.protocol import events as ev
from nbelastic.system.future_results import resolve_if_pending

T = TypeVar("T")
Predicate = Callable[[ClusterState], T | None]


class Pending:
    """Lives in the driver's thread.

    - `cluster()`: the present cluster state.
    - `post(event)`: puts an event into the driver's inbox.
    - `error()`: the exception for futures that can no longer be resolved.
    - `publish()`: sends clients what has changed.
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
        self._posted: list[
            tuple[ev.Event, Predicate[Any], Future[Any]]
        ] = []  # until the driver has decided on the event
        self._tracked: set[Future[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        """How many predicates are evaluated after each event."""
        return len(self._waiting)

    def track(self, future: Future[T]) -> Future[T]:
        """Fail this future if the driver stops before it is resolved."""
        self._tracked.add(future)
        future.add_done_callback(self._tracked.discard)
        if self._closed:
            resolve_if_pending(future.set_exception, self._error())
        return future

    def resolve(self, future: Future[T], predicate: Predicate[T]) -> None:
        """Resolve `future` with the first result of `predicate(cluster)` that is not None."""
        self._waiting.append((predicate, future))
        self.check_and_publish()

    def resolve_after(self, event: ev.Event, future: Future[T], predicate: Predicate[T]) -> None:
        """Post this event. When the driver has decided on it, `resolve` the future."""
        self._posted.append((event, predicate, self.track(future)))
        self._post(event)

    def on_decisions(self, events: Iterable[ev.Event]) -> None:
        """The driver has decided on these events: evaluate the predicates that wait for them from now on."""
        decided = {id(event) for event in events} if self._posted else ()
        for posted in [posted for posted in self._posted if id(posted[0]) in decided]:
            self._posted.remove(posted)
            self._waiting.append(posted[1:])

    def check(self) -> None:
        """Evaluate each predicate, and resolve its future with the result."""
        for predicate, future in list(self._waiting):
            if future.done():  # the caller has given up
                continue
            try:
                result = predicate(self._cluster())
            except Exception as error:  # noqa: BLE001  (the caller gets it)
                resolve_if_pending(future.set_exception, error)
            else:
                if result is not None:
                    resolve_if_pending(future.set_result, result)
        self._waiting = [entry for entry in self._waiting if not entry[1].done()]

    def check_and_publish(self) -> None:
        """Something outside the cluster state has changed."""
        self.check()
        self._publish()

    def fail_all(self, *, close: bool = False) -> None:
        """Fail all tracked futures; with `close` also those that are tracked later."""
        self._closed = self._closed or close
        for future in list(self._tracked):
            resolve_if_pending(future.set_exception, self._error())
