"""What a worker does for the next generation while this one trains: it offers a store, and builds the group.

All of it runs in one thread, one task after the other, so that a connection that one task opens is not taken for
another's. A task that hangs in a generation that will not be is left behind with its thread: gloo cannot be woken where it
waits for a peer to connect that was killed or stopped just before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from nbelastic.worker.formation import Formation
from nbelastic.worker.process_group import Group, Offer

T = TypeVar("T")

PATIENCE = 0.1  # seconds that a group which is aborted may go on being built


class Ahead:
    """`offer` is the store for the next generation, `group` is the next generation's, if they are there yet."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.RLock()  # the link's thread and the main thread both change what follows
        self._thread = _thread()
        self._aborted_at = 0.0  # since when the present group has been aborted
        self._peers: Collection[str] = ()  # the addresses of the present world's members
        self._expected: frozenset[str] = frozenset()  # those of hosts on which workers were started for the next one
        self.offer: Offer | None = None
        self.group: Group | None = None

    def run(self, task: Callable[[], Any]) -> Future[Any]:
        """`task` in the thread, when what came before it is done."""
        with self._lock:
            return self._thread.submit(task)

    def leave_behind(self) -> None:
        """What runs there hangs: what comes next gets a thread of its own."""
        with self._lock:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = _thread()

    def make_offer(self, peers: Collection[str], then: Callable[[str], object]) -> None:
        """A store, and word of where it is. Until it is needed only `peers`, members now, and who is expected can connect."""

        def make() -> None:
            self._peers = peers
            offer = self._make_offer()
            self._narrow()
            then(offer.endpoint)

        self.run(make)

    def expect(self, addresses: Collection[str]) -> None:
        """Newcomers may come from there: a first packet that is dropped would cost them a second."""

        def widen() -> None:
            self._expected |= set(addresses)
            self._narrow()

        self.run(widen)

    def _narrow(self) -> None:
        if self.offer is not None:
            self.offer.admit_only({*self._peers, *self._expected})

    def move(self, address: str) -> None:
        """Stores are offered at this address from now on; the one that lies ready is not."""

        def discard() -> None:
            self._address, self.offer = address, None

        self.run(discard)

    def take_offer(self) -> Offer:
        """The store, made now if there is none. All can connect, before anybody is told to."""
        self._make_way()
        offer: Offer = self.run(self._make_offer).result()
        offer.admit_all()
        self.offer = None
        return offer

    def _make_offer(self) -> Offer:
        self.offer = self.offer or Offer(self._address)
        return self.offer

    def prepare(
        self, formation: Formation, device: torch.device, backend: str, then: Callable[[Exception | None], object]
    ) -> None:
        """Build the group of `formation`; `then` is told why it could not be, or None."""
        self._make_way()
        group = Group(formation.generation, device, backend)
        group.settled, self._aborted_at = False, 0.0
        self.group = group

        def build() -> None:
            failure = None
            try:
                group.prepare(formation, self.offer)
            except Exception as error:  # noqa: BLE001  (torch raises many kinds; the driver decides what follows)
                failure = error
            group.settled = True
            then(failure)

        self.run(build)

    def take(self, generation: int) -> Group | None:
        """The group of this generation, if it was prepared. Another one's is not to be in its way."""
        group = self.group
        if group is None or group.generation != generation:
            self._make_way()
            return None
        self.group = None
        return group

    def abort(self) -> bool:
        """The group will not be. To be repeated until this says that it is gone."""
        group = self.group
        if group is None:
            return True
        group.abort()
        now = time.monotonic()
        self._aborted_at = self._aborted_at or now
        if group.settled:
            self.group = None
            self.run(group.drop)
            self.run(self._narrow)
        elif now - self._aborted_at > PATIENCE:
            self._make_way()
        return self.group is None

    def _make_way(self) -> None:
        """A group that is still being built is given up: an abort of it would reach whatever is opened from now on."""
        with self._lock:
            group = self.group
            if group is None or group.settled:
                return
            self.group = None
            self.leave_behind()
        group.give_up()


def in_a_thread(task: Callable[[], T]) -> Future[T]:
    """Run `task` in a new thread, which does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(task())
        except BaseException as error:  # noqa: BLE001  (it is raised where the result is asked for)
            future.set_exception(error)

    threading.Thread(target=run, name="nbelastic-apart", daemon=True).start()
    return future


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="nbelastic-ahead")
