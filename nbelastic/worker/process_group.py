"""One generation's process group: form it, abort it from another thread, leave it.

torch ≤ 2.13 cannot abort gloo: a rank that waits for a survivor hangs until the group's timeout. So this module knows the
connections of the generation's groups and ends them; then every rank that blocks in one of them raises.
NCCL's communicators, if the job uses NCCL, are beside gloo's groups: see `accelerator.py`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from nbelastic.system.addresses import bracketed, split_endpoint
from nbelastic.worker.accelerator import Accelerator, Communicators, Factory
from nbelastic.worker.formation import Formation
from nbelastic.worker.socket_filter import admit_all, admit_only
from nbelastic.worker.sockets import Connections, Endpoint, endpoint, listeners, open_sockets
from nbelastic.worker.threads import result_of

POLL = 0.02  # seconds between two checks while a group forms
TIMEOUT = timedelta(minutes=30)  # of a collective: a rank may evaluate for long, and an abort does not wait for this

DEVICE_ATTEMPTS = 20  # to find the listener of a new gloo device, while other threads open listeners too

MAX_KEPT = 2
# The groups that were left last. A group's destructor waits for gloo's threads, which may need the GIL, or hang. Torch
# releases the GIL for it only if Python holds the last reference. If DDP's reducer holds the last one (the user kept a
# wrapper), the process would hang. So keep each group for longer than any wrapper of it, and let a new thread drop it.
_kept: deque[list[Any]] = deque()


class Offer:
    """A fresh store on this worker's interface, in case it becomes rank 0 of the next generation."""

    def __init__(self, address: str, timeout: timedelta = TIMEOUT) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((address, 0))
        listener.listen(1024)
        self.listener = endpoint(*listener.getsockname())
        port = self.listener[1]
        self.endpoint = f"{bracketed(address)}:{port}"
        self._descriptor = listener.detach()  # the store owns it from now on, and keeps it open
        self.store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=self._descriptor, timeout=timeout
        )

    def admit_all(self) -> None:
        """Let every address connect: members may be on hosts that joined after the offer."""
        admit_all(self._descriptor)

    def admit_only(self, addresses: Iterable[str]) -> None:
        """Let only these addresses connect."""
        admit_only(self._descriptor, addresses)


GLOO = dist.ProcessGroupGloo


class Group:
    """The process groups of one generation: torch's default group, and those that the program makes.

    `abort` and `is_intact` may be called in any thread, `form` and `leave` only in the main thread.
    """

    def __init__(
        self, generation: int, accelerator: Accelerator | None = None, earlier: Sequence[Communicators] = ()
    ) -> None:
        """`accelerator`: whose communicators the groups have beside gloo's; None: gloo alone.

        `earlier`: those of the worlds before, the last one's at the end.
        """
        self.generation = generation
        self._communicators = None if accelerator is None else Communicators(accelerator, earlier)
        self.connections: Connections | None = None  # an abort ends these
        self._default: dict[str, int] | None = None  # the connections of the default group when it was complete
        self._was_whole = True  # each pair of ranks was connected when the default group was complete
        self._own: list[tuple[Any, dict[str, int]]] = []  # of each of the program's own groups: options, connections
        self._gloo: Any = None  # the device of all its gloo groups: its one listener accepts all connections
        self._listener = 0  # the descriptor of that listener
        self._listeners: frozenset[Endpoint] = frozenset()  # of all members
        self._store: Any = None
        self._offer: Offer | None = None  # the store's server, on rank 0
        self.subgroups: Any = None  # made on demand
        self._side: list[Any] = []  # groups that torch does not know
        self._prepared: Any = None  # the gloo group, until torch's default group is made of it
        self.peers: Collection[str] = ()  # the addresses of the other members, once it is formed
        self.is_settled = True  # no thread prepares it
        self._is_abandoned = False

    def prepare(self, formation: Formation, offer: Offer | None) -> None:
        """Collective, in any thread: do what takes time in `form`. Raises what torch raises, or ValueError.

        Torch's default group is not changed: it may be another generation's when this is done.
        """
        store = self._open_store(formation, offer)
        prepared = self._make_first(PrefixStore("prepared", store), formation.rank, formation.world_size)
        if self._communicators is not None:
            self._communicators.wait_for_earlier()
            self._refuse_if_abandoned()
            where = PrefixStore("communicator", store)
            self._communicators.prepare(where, formation.rank, formation.world_size, TIMEOUT)
        if self._is_abandoned and self._communicators is not None:
            self._communicators.abort()
        self._refuse_if_abandoned()
        self._prepared = prepared
        self._default = self._complete()
        if not os.environ.get("TORCH_GLOO_LAZY_INIT"):  # else gloo connects at the first use
            # a rank that died just after it connected does not count
            count = self.connections.count(self._default, self._listeners) if self.connections is not None else 0
            self._was_whole = count >= formation.world_size - 1

    def form(
        self,
        formation: Formation,
        offer: Offer,
        start: Callable[[Callable[[], None]], Future[None]],
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Collective. Raises what torch raises if a member dies or the generation is aborted meanwhile.

        `check()` is called every POLL seconds, and may raise. While gloo waits for a peer that never connects, there is no
        connection yet to end, so an abort cannot wake it. NCCL too may wait for seconds. So both wait in the thread
        of `start`, which can be abandoned at no other cost.
        """

        @_as_runtime_error()
        def build() -> None:
            self.prepare(formation, offer)

        if self._prepared is None:
            result_of(start(build), check, POLL)
        with _as_runtime_error():
            self._init(formation)
            if self._communicators is not None:  # they have opened more
                self._default = {**(self._default or {}), **self._complete()}  # with those that were closed meanwhile
        offer.admit_only(self.peers if offer is self._offer else ())

    def _make_for_torch(self, store: Any, rank: int, size: int, timeout: timedelta = TIMEOUT, **_options: Any) -> Any:
        return self.make_gloo(store, rank, size, timeout)  # torch 2.15 also passes `enable_reconfigure`: not used

    def make_gloo(self, store: Any, rank: int, size: int, timeout: timedelta = TIMEOUT) -> Any:
        """Called when torch makes a gloo group: the default group, or one of the program's own."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            return prepared
        if self._gloo is None:
            return self._make_first(store, rank, size, timeout)
        if not os.environ.get("TORCH_GLOO_LAZY_INIT"):  # else the listener is open: members may connect later
            admit_only(self._listener, self.peers)
        try:
            made = self._make(store, rank, size, timeout)
        finally:
            now = self._complete()
        self._own = [own for own in self._own if not own[1].keys().isdisjoint(now)]  # drop groups that are closed
        known = {inode for _, sockets in self._own for inode in sockets}.union(self._default or ())
        self._own.append((made.options, {inode: fd for inode, fd in now.items() if inode not in known}))
        return made

    def side_group(self, name: str, rank: int, size: int) -> Any:
        """Collective, in any thread: a gloo group beside torch's, for messages that no other code may mix with its own."""
        store = self._store
        if store is None:
            raise RuntimeError("this group was left")
        self._side.append(self.make_gloo(PrefixStore(name, store), rank, size))
        return self._side[-1]

    def _make_first(self, store: Any, rank: int, size: int, timeout: timedelta = TIMEOUT) -> Any:
        """Exchange the endpoints of all members' listeners before any member connects: they identify the connections."""
        assert self.connections is not None
        self._gloo, self._listener, (address, port) = _new_device(self.connections.before)
        self.connections.listeners |= {(address, port)}
        store.set(f"listener/{rank}", f"{address} {port}")
        texts = store.multi_get([f"listener/{other}" for other in range(size)])
        endpoints = (text.decode().split() for text in texts)
        self._listeners = frozenset((address, int(number)) for address, number in endpoints)
        self.connections.listeners |= self._listeners
        return self._make(store, rank, size, timeout)

    def _make(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = GLOO._Options()
        options._devices, options._timeout = [self._gloo], timeout
        return GLOO(store, rank, size, options)

    def _complete(self) -> dict[str, int]:
        """All connections exist: let no other process connect, except members to the store. Returns the connections."""
        connections = self.connections
        if connections is None:  # this group was abandoned
            return {}
        now = connections.now()
        self.peers = connections.peers(now)
        if self._offer is not None:
            self._offer.admit_only(self.peers)
        if not os.environ.get("TORCH_GLOO_LAZY_INIT"):  # else gloo connects at the first use
            admit_only(self._listener, ())
        return now

    def _open_store(self, formation: Formation, offer: Offer | None) -> Any:
        """Connect to rank 0's store. Rank 0 connects too: the server's own client must outlive an abort of this group."""
        self.connections = connections = Connections()
        address, port = split_endpoint(formation.store)
        connections.listeners = frozenset({endpoint(address, port)})
        if formation.rank == 0:
            if offer is None or offer.endpoint != formation.store:
                raise ValueError("the store that this rank offered does not exist any more")
            offer.admit_all()
            self._offer = offer
            connections.listeners |= {offer.listener}
        client = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        self._refuse_if_abandoned()
        self._store = PrefixStore(f"generation/{formation.generation}", client)
        return self._store

    def _init(self, formation: Formation) -> None:
        """Make it torch's default group. All gloo groups that torch makes from now on belong to this generation."""
        # torch numbers groups and uses the number in the store's keys; a failed forming has used up one on this rank only.
        dist.distributed_c10d._world.group_count = 0
        dist.distributed_c10d.ProcessGroupGloo = Factory(GLOO, self._make_for_torch)
        if self._communicators is not None:
            self._communicators.use_for_new_groups()
        hook = sys.excepthook
        # Without `device_id`: with it, ranks that are not in a new group would have to take part in making it.
        dist.init_process_group(
            "gloo" if self._communicators is None else self._communicators.backend,
            store=self._store,
            rank=formation.rank,
            world_size=formation.world_size,
            timeout=TIMEOUT,
        )
        sys.excepthook = hook  # torch wraps it once more each time
        if self._prepared is not None:  # torch's default group has no part of gloo
            self._side.append(self._prepared)
            self._prepared = None

    def _refuse_if_abandoned(self) -> None:
        if self._is_abandoned:
            raise ValueError("this group was abandoned")

    def abandon(self) -> None:
        """The thread that prepares it may hang: abort it once, and end none of its later connections."""
        self._is_abandoned = True
        self.abort(for_all=True)
        self.connections = None

    def drop(self) -> None:
        """Release what was prepared and never used."""
        self._prepared = self._store = self._offer = self._gloo = None
        if self._communicators is not None:
            self._communicators.abort()
        if self.connections is not None:
            self.connections.close()

    def abort(self, *, for_all: bool = False) -> None:
        """Make this rank raise if it blocks in this group; `for_all`: the other ranks too, which may not wake each of them.

        To be repeated until the group is left: it may still be forming.
        """
        connections, communicators = self.connections, self._communicators
        if connections is None:
            return
        if communicators is not None:  # first, as it frees the main thread, and listing the connections takes time
            communicators.abort()
        targets = connections.now()
        if self.connections is connections:  # else it was left meanwhile: they may belong to the next generation
            connections.end(targets)
            if for_all:
                connections.close()

    @property
    def error(self) -> str:
        """What went wrong in a collective that did not raise, or an empty string. In any thread."""
        return "" if self._communicators is None else self._communicators.error()

    def is_intact(self) -> bool:
        """Whether every connection of the groups still exists: then no collective failed because of a peer.

        Groups that the program has destroyed do not count: the first rank to do so closes them for all.
        """
        if self._default is None or not self._was_whole or self.error:
            return False
        backends = [backend for group in dist.distributed_c10d._world.pg_map for backend in _backends(group)]
        in_use = {id(backend.options) for backend in (*backends, *self._side) if isinstance(backend, GLOO)}
        expected = dict(self._default)
        for options, sockets in self._own:
            expected |= sockets if id(options) in in_use else {}
        now = open_sockets()
        poll = select.poll()
        for inode, fd in expected.items():
            if now.get(inode) != fd:
                return False
            poll.register(fd, select.POLLRDHUP)
        return not poll.poll(0)

    def leave(self, *, others_may_wait: bool = False) -> Communicators | None:
        """Close it. The connections first: two ranks that leave by themselves could wait for each other.

        Returns NCCL's communicators. With `others_may_wait`, another rank may not have received the last data that NCCL sends
        for this one: then the caller aborts them later. Else their abort has begun.
        """
        self._is_abandoned = True  # a thread that still builds it stops
        communicators = self._communicators
        if others_may_wait:
            self._communicators = None
        self.abort()
        dist.distributed_c10d.ProcessGroupGloo = GLOO
        _kept.append([*dist.distributed_c10d._world.pg_map, *self._side, self._store, self._offer])
        if dist.is_initialized():
            if communicators is None:
                with contextlib.suppress(RuntimeError):  # an aborted group has no connection left
                    dist.destroy_process_group()
            _forget_groups()  # else torch would refuse the next generation's default group
        if communicators is not None:
            communicators.release()
        self._store = self._offer = self.subgroups = self._gloo = None
        self.connections = self._default = None
        self._own, self._side = [], []
        if len(_kept) > MAX_KEPT:
            threading.Thread(target=_kept.popleft().clear, name="nbelastic-drop", daemon=True).start()
        return communicators


def _forget_groups() -> None:
    """What `destroy_process_group` does without waiting for other ranks: torch has no group any more."""
    world = dist.distributed_c10d._world
    dist.distributed_c10d._update_default_pg(None)
    for groups in ("map", "names", "group_ranks", "backend_config", "to_tag", "coalesce_state"):
        getattr(world, f"pg_{groups}").clear()
    world.tags_to_pg.clear()
    dist.distributed_c10d._unregister_all_process_groups()
    world.group_count = 0


def _new_device(before: Collection[str]) -> tuple[Any, int, Endpoint]:
    """A gloo device on this process's interface, its listener's descriptor and endpoint. RuntimeError if it is not found.

    `before`: the sockets that were open when this generation began.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for _ in range(DEVICE_ATTEMPTS):
        device = GLOO.create_device(interface=interface) if interface else GLOO.create_default_device()
        now = open_sockets()
        new = listeners(fd for inode, fd in now.items() if inode not in before)
        if len(new) == 1:  # else another thread has opened a listener meanwhile
            return device, *new.popitem()
        before = now
    raise RuntimeError(
        f"gloo's listener was not found, {DEVICE_ATTEMPTS} times: unset GLOO_DEVICE_TRANSPORT, "
        "or open no listeners in threads while the world changes."
    )


@contextlib.contextmanager
def _as_runtime_error() -> Iterator[None]:
    """Torch may raise any error if another process has changed the store: the user's program did not cause it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError):
            raise
        raise RuntimeError(f"the group could not be formed: {type(error).__name__}: {error}") from error


def collectives() -> int:
    """How many operations the groups of this process have begun: the sum of their sequence numbers."""
    return sum(_sequence_number(group) for group in dist.distributed_c10d._world.pg_map)


def world_collectives() -> int:
    """The operations of the default group, in which every rank takes part: a rank with fewer than another is behind it."""
    world = dist.group.WORLD  # read once: the main thread may leave it while the link's thread asks
    return _sequence_number(world) if world is not None else 0


def _sequence_number(group: Any) -> int:
    return sum(int(backend._get_sequence_number_for_group()) for backend in _backends(group))


def _backends(group: Any) -> list[Any]:
    """The group's back end for each kind of device that it supports."""
    return [group._get_backend(torch.device(kind)) for kind in {str(kind.type) for kind in group._device_types}]
