"""A rendezvous handler of torchelastic's that decides nothing: it asks the driver.

Each time a node waits for a round it offers a fresh TCPStore; the round uses the one of its first node, so no round sees
keys of another. Ranks are the driver's too: the first node writes them where torch's agents look for them.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

from msgspec.structs import replace
from torch.distributed import DistError, Store, TCPStore
from torch.distributed.elastic.agent.server.api import _RoleInstanceInfo
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from nbelastic.protocol import messages, node_messages
from nbelastic.protocol import script_events as sev
from nbelastic.system.addresses import address_of, bracketed, split_endpoint
from nbelastic.system.interfaces import interface_of
from nbelastic.transport.client import Client

BACKEND = "nbelastic"
NICS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
AGAIN = 0.5  # seconds between words of the same waiting
PATIENCE = 1.0  # seconds for one try to reach the store of a round's first node
FAREWELL = 2.0  # seconds that the first node's store stays, at most, when it has finished
REACH = 30.0  # seconds in which it has to be reached
STORE = 300.0  # seconds that torch's agents and workers wait for a key, as with torch's own handlers


class DriverRendezvous(RendezvousHandler):  # type: ignore[misc]  # torch carries no types here
    """One node's side. `hear` is called in the link's thread, all else in the main one.

    `home`: the address where this node offers its stores, and the interface on which its workers meet the others.
    `before_round(round)` is called with each round that this node is in, before torch sees it.
    """

    def __init__(
        self,
        link: Callable[[Callable[[messages.Message], None]], Client],
        ready: sev.NodeReady,
        home: tuple[str, str],
        *,
        timeout: float | None = None,
        before_round: Callable[[node_messages.Round], None] = lambda _: None,
        told: Callable[[str], None] = lambda _: None,
        leaves: bool = False,
    ) -> None:
        self._ready, self._home, self._timeout = ready, home, timeout
        self._nics = tuple(name for name in NICS if name not in os.environ)  # that the user has not set
        self._before_round, self._told, self._leaves = before_round, told, leaves
        self._orders: queue.Queue[
            node_messages.Round | messages.Rehome | node_messages.Wait | node_messages.EndNode
        ] = queue.Queue()
        self._dismissed: node_messages.EndNode | None = None
        self._left = 0  # the newest round that is to be left
        self._offers: dict[str, TCPStore] = {}  # since the last round
        self._store: TCPStore | None = None  # of the present round, if it is this node's
        self._round: node_messages.Round | None = None
        self._said: sev.NodeReady | None = None  # while it waits for a round
        self.link = link(self.hear)
        self.link.start()

    def hear(self, message: messages.Message) -> None:
        match message:
            case messages.NewDriver():
                self._introduce()
            case node_messages.LeaveRound(round=number):
                self._left = max(self._left, number)
            case node_messages.EndNode():
                self._dismissed = message
                self._orders.put(message)
            case node_messages.Round() | node_messages.Wait():
                self._orders.put(message)
            case messages.Rehome(address=address, interface=interface):
                self._home = (address, interface)
                self._orders.put(message)

    def _introduce(self) -> None:
        """A driver that had others before it does not know this node. Once it is seated, that is over for it anyway."""
        if (said := self._said) is not None:
            self.link.reset_session(lambda: said)

    # ---- what torch's agent asks ----

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Workers meet in the round's store, unless torch's own switch says otherwise."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round. RendezvousTimeoutError, RendezvousClosedError, each with the driver's reason."""
        end = time.monotonic() + self._timeout if self._timeout is not None else None
        while True:
            self._round = order = self._wait_for_round(end)
            self._said = None
            store = self._enter(order)
            if store is not None:
                break
        self._before_round(order)
        return RendezvousInfo(store, order.rank, len(order.assignments), self._bootstrap(order, store))

    def is_closed(self) -> bool:
        return self._dismissed is not None

    def set_closed(self) -> None:
        """Only the driver closes."""

    def num_nodes_waiting(self) -> int:
        """Not 0: end the workers and come back."""
        if self._dismissed is not None:
            self._end(self._dismissed)
        return int(self._round is not None and self._left >= self._round.round)

    def get_run_id(self) -> str:
        """The job's name, once it is known."""
        return self._round.job if self._round is not None else self._ready.job or "none"

    def shutdown(self) -> bool:
        """After the end of torch's agent."""
        self._store = None
        return True

    def linger(self) -> None:
        """At the end: the others may still be reading the store of the first node, so it stays until all have finished."""
        if self._round is not None and self._round.rank == 0 and len(self._round.assignments) > 1:
            end = time.monotonic() + FAREWELL
            while self._dismissed is None and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(0.2)

    # ---- how ----

    @property
    def round(self) -> node_messages.Round | None:
        """The one that this node is in, or was in last."""
        return self._round

    def _wait_for_round(self, end: float | None) -> node_messages.Round:
        """Say that this node is ready, again and again, until it is seated."""
        last = self._round.round if self._round is not None else 0
        reason = "the driver has not answered"
        store, said_at = self._offer(), 0.0
        while True:
            if self._dismissed is not None:
                self._end(self._dismissed)
            self._mind_driver()
            now = time.monotonic()
            if now >= said_at + AGAIN:
                said_at = now
                self._said = replace(self._ready, round=last, store=store, pid=os.getpid())
                self.link.send(self._said)
            try:
                order = self._orders.get(timeout=max(0.0, said_at + AGAIN - now))
            except queue.Empty:
                order = None
            match order:
                case node_messages.Round(round=number) if number > last and number > self._left:
                    return order
                case messages.Rehome() if self._home[0] != address_of(store):
                    store, said_at = self._offer(), 0.0
                case node_messages.Wait():
                    if order.reason != reason:
                        self._told(order.reason)
                    reason = order.reason
                    if order.full and self._leaves:
                        raise RendezvousClosedError(reason)
            if end is not None and time.monotonic() > end:
                raise RendezvousTimeoutError(f"no round within {self._timeout:g} s: {reason}")

    def _mind_driver(self) -> None:
        """Whether somebody else ends this node if the driver is gone."""

    def _offer(self) -> str:
        """A fresh store, on this node's address alone; where it is. Earlier ones stay: a round may be forming with one."""
        address, interface = self._home
        for name in self._nics:
            os.environ[name] = interface or interface_of(address)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((address, 0))
            listener.listen(1024)
            port = int(listener.getsockname()[1])
            endpoint = f"{bracketed(address)}:{port}"
            self._offers[endpoint] = TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE),
                master_listen_fd=listener.detach(),
            )
        return endpoint

    def _enter(self, order: node_messages.Round) -> Store | None:
        """The round's store, with this node's ranks in it; None if the round is over before that.

        RendezvousConnectionError if it cannot be reached from here.
        """
        host, port = split_endpoint(order.store)
        self._store = self._offers.get(order.store)
        self._offers.clear()
        if order.rank == 0:
            store = self._store
            assert store is not None
            _write_ranks(store, order)
            return store
        end = time.monotonic() + REACH
        while self._left < order.round and self._dismissed is None:
            self._mind_driver()
            try:
                store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=PATIENCE))
            except DistError:
                if time.monotonic() > end:
                    raise RendezvousConnectionError(
                        f"the store of {order.assignments[0].host} at {order.store} is not reached from {self._home[0]}"
                    ) from None
                continue
            try:
                store.wait([f"{RANKS}{order.rank}"], timedelta(seconds=PATIENCE))
            except DistError:
                continue
            store.set_timeout(timedelta(seconds=STORE))
            return store
        return None

    def _bootstrap(self, order: node_messages.Round, store: Store) -> RendezvousStoreInfo:
        host, port = split_endpoint(order.store)
        if self.use_agent_store:
            return RendezvousStoreInfo(host, port)
        return RendezvousStoreInfo.build(order.rank, store, host)

    def _end(self, dismissal: node_messages.EndNode) -> NoReturn:
        if self._ready.external:
            if dismissal.error:
                raise RendezvousClosedError(dismissal.reason)
            print(f"nbelastic: {dismissal.reason}", file=sys.stderr)
            raise SystemExit(0)
        raise RendezvousGracefulExitError(dismissal.reason)


RANKS, ROLES = "torchelastic/assigned_ranks/", "torchelastic/role_info/"  # where torch's agents look


def _write_ranks(store: Store, order: node_messages.Round) -> None:
    """All that torch's agents tell one another before they start workers: none of them has to wait for another."""
    for rank, seat in enumerate(order.assignments):
        store.set(f"{ROLES}{rank}", _RoleInstanceInfo(seat.role, rank, seat.workers).serialize())
    for rank, numbers in enumerate(order.rank_numbers):
        store.set(f"{RANKS}{rank}", json.dumps(numbers))
