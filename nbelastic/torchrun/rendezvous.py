"""A rendezvous handler for torchelastic; the driver makes its decisions.

Whenever a node waits for a round it offers a new TCPStore. A round uses the store of its first node, so it sees no keys
of other rounds. The driver also assigns the ranks: the first node writes them where torch's agents read them.
"""

from __future__ import annotations

import json
import os
import queue
import signal
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
from nbelastic.system.signal_safe_queue import SignalSafeQueue
from nbelastic.transport.client import Client

BACKEND = "nbelastic"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
REPEAT_READY = 0.5  # seconds between two `NodeReady` while a node waits
CONNECT_TRY = 1.0  # seconds for one try to connect to the store of a round's first node
CONNECT_TIMEOUT = 30.0  # seconds for all tries
KEEP_STORE = 2.0  # seconds, at most, that the first node's store stays open after it has finished
KEY_TIMEOUT = 300.0  # seconds that torch's agents and workers wait for a key, as with torch's own handlers


class DriverRendezvous(RendezvousHandler):  # type: ignore[misc]  # torch carries no types here
    """One node's end of the rendezvous. `receive` is called in the client's thread, all else in the main thread.

    `connect(receive)` makes the client. `home`: the address on which this node offers its stores, and the interface that
    its workers use. `before_round(round)` is called before torch's agent enters a round, `on_wait(reason)` when the
    driver's reason to wait changes. `leaves_if_full`: end if the cluster has no slot for this node.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[messages.Message], None]], Client],
        ready: sev.NodeReady,
        home: tuple[str, str],
        *,
        timeout: float | None = None,
        before_round: Callable[[node_messages.Round], None] = lambda _: None,
        on_wait: Callable[[str], None] = lambda _: None,
        leaves_if_full: bool = False,
    ) -> None:
        self._ready, self._home, self._timeout = ready, home, timeout
        self._unset_variables = tuple(name for name in INTERFACE_VARIABLES if name not in os.environ)
        self._before_round, self._on_wait, self._leaves_if_full = before_round, on_wait, leaves_if_full
        self._inbox: SignalSafeQueue[node_messages.Round | messages.Rehome | node_messages.Wait | node_messages.EndNode]
        self._inbox = SignalSafeQueue()
        self._end_message: node_messages.EndNode | None = None
        self._round_to_leave = 0  # the newest one; earlier ones are to be left too
        self._offers: dict[str, TCPStore] = {}  # since the last round, by endpoint
        self._store: TCPStore | None = None  # the present round's, if this node offered it
        self._round: node_messages.Round | None = None
        self._sent_ready: sev.NodeReady | None = None  # None unless this node waits for a round
        self.link = connect(self.receive)
        self.link.start()

    def receive(self, message: messages.Message) -> None:
        match message:
            case messages.NewDriver():
                self._on_new_driver()
            case node_messages.LeaveRound(round=number):
                self._round_to_leave = max(self._round_to_leave, number)
            case node_messages.EndNode():
                self._end_message = message
                self._inbox.put(message)
            case node_messages.Round() | node_messages.Wait():
                self._inbox.put(message)
            case messages.Rehome(address=address, interface=interface):
                self._home = (address, interface)
                self._inbox.put(message)

    def _on_new_driver(self) -> None:
        """Send NodeReady to a driver that does not know this node. A node in a round sends nothing: its round ends."""
        if (ready := self._sent_ready) is not None:
            self.link.reset_session(lambda: ready)

    # ---- called by torch's agent ----

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the round's store: yes, unless torch's own environment variable forbids it."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round. RendezvousTimeoutError and RendezvousClosedError name the driver's reason."""
        end = time.monotonic() + self._timeout if self._timeout is not None else None
        while True:
            self._round = new_round = self._wait_for_round(end)
            self._sent_ready = None
            store = self._open_store(new_round)
            if store is not None:
                break
        self._before_round(new_round)
        return RendezvousInfo(store, new_round.rank, len(new_round.assignments), self._bootstrap(new_round, store))

    def is_closed(self) -> bool:
        return self._end_message is not None

    def set_closed(self) -> None:
        """Do nothing: only the driver closes the rendezvous."""

    def num_nodes_waiting(self) -> int:
        """1 if torch's agent must end its workers and call `next_rendezvous` again, else 0."""
        if self._end_message is not None:
            self._raise_end(self._end_message)
        return int(self._round is not None and self._round_to_leave >= self._round.round)

    def get_run_id(self) -> str:
        """The job's name; "none" if it is not known yet."""
        return self._round.job if self._round is not None else self._ready.job or "none"

    def shutdown(self) -> bool:
        """Called when torch's agent has ended."""
        self._store = None
        return True

    def keep_store(self) -> None:
        """Keep the first node's store open until all nodes have finished: they may still be reading it."""
        if self._round is not None and self._round.rank == 0 and len(self._round.assignments) > 1:
            end = time.monotonic() + KEEP_STORE
            while self._end_message is None and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(0.2)

    # ---- rounds and stores ----

    @property
    def round(self) -> node_messages.Round | None:
        """The round that this node is in, or was in last."""
        return self._round

    def _wait_for_round(self, end: float | None) -> node_messages.Round:
        """Send NodeReady repeatedly until the driver sends a new round."""
        last = self._round.round if self._round is not None else 0
        reason = "the driver has not answered"
        store, sent_at = self._offer_store(), 0.0
        while True:
            if self._end_message is not None:
                self._raise_end(self._end_message)
            self._check_driver()
            now = time.monotonic()
            if now >= sent_at + REPEAT_READY:
                sent_at = now
                self._sent_ready = replace(self._ready, round=last, store=store, pid=os.getpid())
                if not self.link.congested:  # else the driver is away, and still gets the first ones
                    self.link.send(self._sent_ready)
            try:
                message = self._inbox.get(max(0.0, sent_at + REPEAT_READY - now))
            except queue.Empty:
                message = None
            match message:
                case node_messages.Round(round=number) if number > last and number > self._round_to_leave:
                    return message
                case messages.Rehome() if self._home[0] != address_of(store):
                    store, sent_at = self._offer_store(), 0.0
                case node_messages.Wait():
                    if message.reason != reason:
                        self._on_wait(message.reason)
                    reason = message.reason
                    if message.full and self._leaves_if_full:
                        raise RendezvousClosedError(reason)
            if end is not None and time.monotonic() > end:
                raise RendezvousTimeoutError(f"no round within {self._timeout:g} s: {reason}")

    def _check_driver(self) -> None:
        """Raise if the driver is lost and this node must end. A host's node need not: its agent ends it."""

    def _offer_store(self) -> str:
        """Open a new store on this node's address; return its endpoint. Earlier stores stay, as a round may use one."""
        address, interface = self._home
        for name in self._unset_variables:
            exact = "=" if name.startswith("NCCL") else ""  # else NCCL takes each name that begins so
            os.environ[name] = exact + (interface or interface_of(address))
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
                timeout=timedelta(seconds=KEY_TIMEOUT),
                master_listen_fd=listener.detach(),
            )
        return endpoint

    def _open_store(self, new_round: node_messages.Round) -> Store | None:
        """The round's store, once it holds this node's ranks; None if the round ends before that.

        RendezvousConnectionError if this node cannot connect to it.
        """
        host, port = split_endpoint(new_round.store)
        self._store = self._offers.get(new_round.store)
        self._offers.clear()
        if new_round.rank == 0:
            store = self._store
            assert store is not None
            _write_ranks(store, new_round)
            return store
        end = time.monotonic() + CONNECT_TIMEOUT
        while self._round_to_leave < new_round.round and self._end_message is None:
            self._check_driver()
            try:
                store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECT_TRY))
            except DistError:
                if time.monotonic() > end:
                    first_host = new_round.assignments[0].host
                    raise RendezvousConnectionError(
                        f"the store of {first_host} at {new_round.store} cannot be reached from {self._home[0]}"
                    ) from None
                continue
            try:
                store.wait([f"{RANKS}{new_round.rank}"], timedelta(seconds=CONNECT_TRY))
            except DistError:
                continue
            store.set_timeout(timedelta(seconds=KEY_TIMEOUT))
            return store
        return None

    def _bootstrap(self, new_round: node_messages.Round, store: Store) -> RendezvousStoreInfo:
        host, port = split_endpoint(new_round.store)
        if self.use_agent_store:
            return RendezvousStoreInfo(host, port)
        return RendezvousStoreInfo.build(new_round.rank, store, host)

    def _raise_end(self, message: node_messages.EndNode) -> NoReturn:
        if self._ready.external:
            if message.error:
                raise RendezvousClosedError(message.reason)
            print(f"nbelastic: {message.reason}", file=sys.stderr)
            raise SystemExit(0)
        # The host's agent may send SIGTERM, too. While torch's agent ends the workers, that would kill them before they have saved.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise RendezvousGracefulExitError(message.reason)


RANKS, ROLES = "torchelastic/assigned_ranks/", "torchelastic/role_info/"  # keys that torch's agents read


def _write_ranks(store: Store, new_round: node_messages.Round) -> None:
    """Write what torch's agents exchange before they start workers, so that none of them waits for another."""
    for rank, assignment in enumerate(new_round.assignments):
        store.set(f"{ROLES}{rank}", _RoleInstanceInfo(assignment.role, rank, assignment.workers).serialize())
    for rank, numbers in enumerate(new_round.rank_numbers):
        store.set(f"{RANKS}{rank}", json.dumps(numbers))
