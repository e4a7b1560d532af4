"""One generation's process group: how to form it, how to abort it from another thread, how to leave it.

Gloo (torch ≤ 2.13) cannot be aborted: a rank that waits on a survivor hangs for the whole time-out. The cure, measured:
know the connections of the generation's groups and shut them down; every rank that blocks in any of them raises.
NCCL: `_abort_process_group()` from the link's thread, with the device set.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from nbelastic.protocol.events import HUNG
from nbelastic.system.addresses import bracketed, parted
from nbelastic.worker.formation import Formation
from nbelastic.worker.socket_filter import admit_all, admit_only
from nbelastic.worker.sockets import Connections, Endpoint, endpoint, listeners, open_sockets, peers, shut_down

LOOK = 0.02  # seconds between looks at whether to go on waiting for a group
TIMEOUT = timedelta(minutes=30)  # of a collective: a rank may well evaluate for long; aborts do not wait for it

DEVICES = 20  # of gloo's, until one is told from the listeners that other threads open

KEPT = 2
# The groups that were left last. A group's destructor waits for gloo's threads, which may need the GIL, or be stuck. Torch
# lets go of the GIL for it only where Python holds the last reference; where DDP's reducer does (a wrapper that the user
# kept), it would not, and the process would hang for ever. So we keep each group for longer than any wrapper of it, and
# let a thread of its own drop it.
_kept: deque[list[Any]] = deque()
NCCL_PATIENCE = 5.0  # seconds that an abort may take


def backend_for(choice: str, slots: int) -> str:
    """torch's name of the back end: NCCL needs a GPU a worker, gloo takes everything else. ValueError if it cannot be."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "nccl" and gpus < slots:
        raise ValueError(f"backend nccl needs a GPU a slot: this host has {gpus} for {slots} slots; use gloo or auto.")
    if choice == "gloo" or gpus < slots or gpus == 0:
        return "gloo"
    return "cpu:gloo,cuda:nccl"


class Offer:
    """A fresh store on this worker's interface, in case it becomes rank 0 of the next generation."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((address, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        self.endpoint = f"{bracketed(address)}:{port}"
        self._listener = listener.detach()  # the store's own from now on, and open for as long as that is there
        self.store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=self._listener, timeout=TIMEOUT
        )

    def admit_all(self) -> None:
        """Who comes to form a group may come from a host that was not there when this was offered."""
        admit_all(self._listener)

    def admit_only(self, addresses: Iterable[str]) -> None:
        """Nobody else is to change what is in it."""
        admit_only(self._listener, addresses)


GLOO = dist.ProcessGroupGloo


class UnsupportedError(ValueError):
    """No group can be prepared beside the training here, whoever its members are."""


class Group:
    """The process groups of one generation: torch's default one, and whatever others the program makes in it.

    `abort` and `intact` may be called from any thread, `form` and `leave` not.
    """

    def __init__(self, generation: int, device: torch.device, backend: str) -> None:
        self.generation = generation
        self._device = device
        self._backend = backend
        self._reach: Connections | None = None  # what an abort shuts down, while there is something to abort
        self._whole: dict[str, int] | None = None  # the connections that stood when the default group was complete
        self._own: list[tuple[Any, dict[str, int]]] = []  # of each of the program's own groups: options, connections
        self._gloo: Any = None  # the device of all its gloo groups: its one listener takes all connections
        self._door = 0  # the descriptor of that listener
        self._store: Any = None
        self._offer: Offer | None = None  # the store's server, on rank 0
        self.subgroups: Any = None  # made on demand
        self._aborting: threading.Thread | None = None
        self._made: Any = None  # gloo's half of the default group, until that is made of it
        self.peers: Collection[str] = ()  # the addresses of the other members, once it is formed
        self.settled = True  # no thread prepares it
        self._given_up = False

    def prepare(self, formation: Formation, offer: Offer | None) -> None:
        """Collective, in a thread beside the training: what takes time in `form`. Raises what torch raises, or ValueError.

        For gloo and the CPU only: NCCL's communicators are made by the first collective on the GPU that trains.
        """
        if self._backend != "gloo" or self._device.type != "cpu":
            raise UnsupportedError(f"{self._backend} on {self._device.type} is not prepared beside the training")
        self._build(formation, offer)

    def _build(self, formation: Formation, offer: Offer | None) -> None:
        """Gloo's half. It says nothing to torch, whose default group may be another generation's by the time this is done."""
        store = self._open_store(formation, offer)
        made = self._make_first(PrefixStore("prepared", store), formation.rank, formation.world_size)
        if self._given_up:
            raise ValueError("it was given up")
        self._made = made
        self._whole = self._complete()

    def form(
        self,
        formation: Formation,
        offer: Offer,
        start: Callable[[Callable[[], None]], Future[None]],
        waiting: Callable[[], object] = lambda: None,
    ) -> None:
        """Collective. Raises what torch raises if a member dies or the generation is aborted meanwhile.

        `waiting()` is called now and then, and may raise: gloo cannot be woken where it waits for a peer to connect that
        never will, as there is no connection yet to shut down. So it waits in the thread of `start`, which can be left
        behind; nothing but that is lost.
        """
        if self._made is None and self._device.type != "cuda":
            building = start(lambda: self._build(formation, offer))
            while not wait((building,), LOOK).done:
                waiting()
            with _failing():
                building.result()
        with _failing():
            if self._device.type == "cuda":
                self._open_store(formation, offer)
            self._init(formation)
            self._whole = {**(self._whole or {}), **self._complete()}  # those that have been closed since count too
        offer.admit_only(self.peers if offer is self._offer else ())

    def make_gloo(self, store: Any, rank: int, size: int, timeout: timedelta = TIMEOUT) -> Any:
        """What torch gets where it makes a gloo group: the default one, or one of the program's own."""
        made, self._made = self._made, None
        if made is not None:
            return made
        if self._gloo is None:
            return self._make_first(store, rank, size, timeout)
        if not os.environ.get("TORCH_GLOO_LAZY_INIT"):  # else it is open: members of other groups may still connect
            admit_only(self._door, self.peers)
        try:
            made = self._make(store, rank, size, timeout)
        finally:
            now = self._complete()
        self._own = [own for own in self._own if not own[1].keys().isdisjoint(now)]  # else all of it is closed
        known = {inode for _, sockets in self._own for inode in sockets}.union(self._whole or ())
        self._own.append((made.options, {inode: fd for inode, fd in now.items() if inode not in known}))
        return made

    def _make_first(self, store: Any, rank: int, size: int, timeout: timedelta = TIMEOUT) -> Any:
        """Each member says where its listener is before anybody connects, so that the connections can be known by that."""
        assert self._reach is not None
        self._gloo, self._door, (address, port) = _new_device()
        self._reach.doors |= {port}
        store.set(f"door/{rank}", f"{address} {port}")
        said = (text.decode().split() for text in store.multi_get([f"door/{other}" for other in range(size)]))
        self._reach.others |= {(theirs, int(number)) for theirs, number in said}
        return self._make(store, rank, size, timeout)

    def _make(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = GLOO._Options()
        options._devices, options._timeout = [self._gloo], timeout
        return GLOO(store, rank, size, options)

    def _complete(self) -> dict[str, int]:
        """All connections stand, and strangers have no business here any more. The store may get more from members.

        Returns these connections.
        """
        reach = self._reach
        if reach is None:  # it was given up
            return {}
        now = reach.now()
        self.peers = peers(now.values())
        if self._offer is not None:
            self._offer.admit_only(self.peers)
        if not os.environ.get("TORCH_GLOO_LAZY_INIT"):  # else gloo connects when it first needs to
            admit_only(self._door, ())
        return now

    def _open_store(self, formation: Formation, offer: Offer | None) -> Any:
        """A client of rank 0's store. On rank 0 too: the server's own client must outlive an abort of this group."""
        self._reach = reach = Connections()
        address, port = parted(formation.store)
        reach.others = frozenset({endpoint(address, port)})
        if formation.rank == 0:
            if offer is None or offer.endpoint != formation.store:
                raise ValueError("the store that was offered is not there any more")
            offer.admit_all()
            self._offer = offer
            reach.doors = frozenset({port})
        client = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        if self._given_up:
            raise ValueError("it was given up")
        self._store = PrefixStore(f"generation/{formation.generation}", client)
        return self._store

    def _init(self, formation: Formation) -> None:
        """Make it torch's default group. From now on all gloo groups that torch makes are of this generation."""
        # torch numbers groups, and the number is in the store's keys; a forming that failed has used one up here only.
        dist.distributed_c10d._world.group_count = 0
        dist.distributed_c10d.ProcessGroupGloo = _Maker(self)
        hook = sys.excepthook
        dist.init_process_group(
            self._backend,
            store=self._store,
            rank=formation.rank,
            world_size=formation.world_size,
            timeout=TIMEOUT,
            device_id=self._device if self._device.type == "cuda" else None,
        )
        sys.excepthook = hook  # torch wraps it once more each time

    def give_up(self) -> None:
        """The thread that prepares it may hang, and is left to itself: from now on this reaches no connection."""
        self._given_up = True
        self.abort()
        self._reach = None

    def drop(self) -> None:
        """It was prepared for nothing."""
        self._made = self._store = self._offer = self._gloo = None

    def abort(self) -> None:
        """Make every rank that blocks in this group raise. To be repeated until it has left: it may still be forming."""
        reach = self._reach
        if reach is None:
            return
        targets = reach.now()
        if self._reach is not reach:  # left meanwhile: what was listed may belong to the next generation
            return
        for inode, fd in targets.items():
            shut_down(fd, inode)
        if self._whole is not None and self._device.type == "cuda" and self._aborting is None:
            # It may wait as long as the group's time-out; the caller's patience is shorter.
            self._aborting = threading.Thread(target=self._abort_nccl, name="nbelastic-abort", daemon=True)
            self._aborting.start()

    def _abort_nccl(self) -> None:
        torch.cuda.set_device(self._device)  # or the abort opens a context on GPU 0
        dist.distributed_c10d._abort_process_group()

    def intact(self) -> bool:
        """Whether every connection of the groups still stands: then no collective failed for a peer's sake.

        A group that the program has destroyed counts no more: the first rank to do so closes it for all.
        """
        if self._whole is None:
            return False
        there = [backend for group in dist.distributed_c10d._world.pg_map for backend in _backends(group)]
        options = {id(backend.options) for backend in there if isinstance(backend, GLOO)}
        whole = dict(self._whole)
        for theirs, sockets in self._own:
            whole |= sockets if id(theirs) in options else {}
        now = open_sockets()
        poll = select.poll()
        for inode, fd in whole.items():
            if now.get(inode) != fd:
                return False
            poll.register(fd, select.POLLRDHUP)
        return not poll.poll(0)

    def leave(self) -> None:
        """Close it. The connections first: two ranks that leave on their own could wait for each other."""
        self._given_up = True  # a thread that still builds it stops
        self.abort()
        if self._aborting is not None:
            self._aborting.join(NCCL_PATIENCE)
            if self._aborting.is_alive():  # nothing on this GPU will move again in this process
                os._exit(HUNG)
        dist.distributed_c10d.ProcessGroupGloo = GLOO
        _kept.append([*dist.distributed_c10d._world.pg_map, self._store, self._offer])
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # an aborted group has nothing left to shut down in order
                dist.destroy_process_group()
        self._store = self._offer = self.subgroups = self._gloo = None
        self._reach = self._whole = None
        self._own = []
        if len(_kept) > KEPT:
            threading.Thread(target=_kept.popleft().clear, name="nbelastic-drop", daemon=True).start()


class _Maker:
    """Stands in for torch's class of gloo groups: those that are made belong to the generation."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, store: Any, rank: int, size: int, timeout: timedelta = TIMEOUT, **_options: Any) -> Any:
        return self._group.make_gloo(store, rank, size, timeout)  # torch 2.15 also gives `enable_reconfigure`: not used

    def __getattr__(self, name: str) -> Any:
        return getattr(GLOO, name)

    def __instancecheck__(self, thing: Any) -> bool:
        return isinstance(thing, GLOO)


def _new_device() -> tuple[Any, int, Endpoint]:
    """A device of gloo's on this process's interface, its listener's descriptor, and where that listens. Or RuntimeError."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for _ in range(DEVICES):
        before = open_sockets()
        device = GLOO.create_device(interface=interface) if interface else GLOO.create_default_device()
        new = listeners(fd for inode, fd in open_sockets().items() if inode not in before)
        if len(new) == 1:  # else another thread has just opened one too
            return device, *new.popitem()
    raise RuntimeError(
        f"gloo's listener was not found, {DEVICES} times: unset GLOO_DEVICE_TRANSPORT, "
        "or open no listeners in threads while the world changes."
    )


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """What torch makes of a store that somebody has changed is nothing that the user's program has raised."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError):
            raise
        raise RuntimeError(f"the group could not be formed: {type(error).__name__}: {error}") from error


def collectives() -> int:
    """How many operations the groups of this process have begun so far: their sequence numbers together."""
    return sum(_begun(group) for group in dist.distributed_c10d._world.pg_map)


def collectives_of_all() -> int:
    """Those of the default group, in which every rank takes part: who has begun fewer than another is behind it."""
    return _begun(dist.group.WORLD) if dist.group.WORLD is not None else 0


def _begun(group: Any) -> int:
    return sum(int(backend._get_sequence_number_for_group()) for backend in _backends(group))


def _backends(group: Any) -> list[Any]:
    """Of each kind of device that it has one for."""
    return [group._get_backend(torch.device(kind)) for kind in {str(kind.type) for kind in group._device_types}]
