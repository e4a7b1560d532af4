"""What a worker prepares for the next generation while this one trains: it offers a store, and builds the group.

One thread does all of it, one task after the other, so that a connection of one task is not taken for another's. If a
task hangs, its thread is abandoned: gloo cannot be woken while it waits for a peer that was killed or stopped before it
connected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nbelastic.worker.accelerator import Accelerator
from nbelastic.worker.formation import Formation
from nbelastic.worker.process_group import Group, Offer

BUILD_TIMEOUT = 0.1  # seconds that a group may go on being built after its abort


class NextGeneration:
    """`offer` is the store for the next generation, `group` its group: None until they are made."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.RLock()  # the link thread and the main thread both replace the group and the thread
        self._thread = _new_thread()
        self._aborted_at = 0.0  # when the first abort of the present group was
        self._peers: Collection[str] = ()  # the addresses of the present world's members
        self._expected: frozenset[str] = frozenset()  # addresses of hosts on which newcomers start
        self.offer: Offer | None = None
        self.group: Group | None = None

    def run(self, task: Callable[[], Any]) -> Future[Any]:
        """Run `task` in the thread, after the tasks before it."""
        with self._lock:
            return self._thread.submit(task)

    def abandon_thread(self) -> None:
        """Its task hangs: later tasks run in a new thread."""
        with self._lock:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = _new_thread()

    def make_offer(self, peers: Collection[str], then: Callable[[str], object]) -> None:
        """Make a store and call `then` with its endpoint. Until it is needed, only `peers` and newcomers can connect."""

        def make() -> None:
            self._peers = peers
            offer = self._make_offer()
            self._limit_addresses()
            then(offer.endpoint)

        self.run(make)

    def expect(self, addresses: Collection[str]) -> None:
        """Newcomers may connect from these addresses: if the filter dropped their first packet, they would lose a second."""

        def widen() -> None:
            self._expected |= set(addresses)
            self._limit_addresses()

        self.run(widen)

    def _limit_addresses(self) -> None:
        if self.offer is not None:
            self.offer.admit_only({*self._peers, *self._expected})

    def change_address(self, address: str) -> None:
        """Offer stores at this address from now on, and drop the one that was made."""

        def discard() -> None:
            self._address, self.offer = address, None

        self.run(discard)

    def take_offer(self) -> Offer:
        """Return the store, made now if there is none. Every address can connect before any member learns of it."""
        self._drop_unfinished()
        offer: Offer = self.run(self._make_offer).result()
        offer.admit_all()
        self.offer = None
        return offer

    def _make_offer(self) -> Offer:
        self.offer = self.offer or Offer(self._address)
        return self.offer

    def prepare(
        self, formation: Formation, accelerator: Accelerator | None, then: Callable[[Exception | None], object]
    ) -> None:
        """Build the group of `formation`, and call `then` with the error, or None."""
        self._drop_unfinished()
        group = Group(formation.generation, accelerator)
        group.is_settled, self._aborted_at = False, 0.0
        self.group = group

        def build() -> None:
            failure = None
            try:
                group.prepare(formation, self.offer)
            except Exception as error:  # noqa: BLE001  (torch raises many kinds; the driver decides what follows)
                failure = error
            group.is_settled = True
            then(failure)

        self.run(build)

    def take(self, generation: int) -> Group | None:
        """Return the group of this generation, if it was prepared. Drop a group that was prepared for another one."""
        group = self.group
        if group is None or group.generation != generation:
            self._drop_unfinished()
            return None
        self.group = None
        return group

    def abort(self) -> bool:
        """Abort the group. To be repeated until this returns True: there is none any more."""
        group = self.group
        if group is None:
            return True
        group.abort()
        now = time.monotonic()
        self._aborted_at = self._aborted_at or now
        if group.is_settled:
            self.group = None
            self.run(group.drop)
            self.run(self._limit_addresses)
        elif now - self._aborted_at > BUILD_TIMEOUT:
            self._drop_unfinished()
        return self.group is None

    def _drop_unfinished(self) -> None:
        """Drop a group that is still being built: an abort of it would reach every connection opened from now on."""
        with self._lock:
            group = self.group
            if group is None or group.is_settled:
                return
            self.group = None
            self.abandon_thread()
        group.abandon()


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="nbelastic-prepare")
