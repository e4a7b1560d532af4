"""One epoch's process group: how to form it, how to abort it from another thread, how to leave it.

Gloo (torch ≤ 2.13) cannot be aborted: a rank that waits on a survivor hangs for the whole time-out. The cure, measured:
remember the connections that forming the group opened and shut them down; every rank that blocks in it raises.
NCCL: `_abort_process_group()` from the link's thread, with the device set.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from nbelastic.core.addresses import bracketed, parted
from nbelastic.core.messages import STUCK
from nbelastic.core.wire import Formation
from nbelastic.worker.admission import admit_all, admit_only, listeners, peers

LOOK = 0.02  # seconds between looks at whether to go on waiting for a group
TIMEOUT = timedelta(minutes=30)  # of a collective: a rank may well evaluate for long; aborts do not wait for it

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
    """A fresh store on this worker's interface, in case it becomes rank 0 of the next epoch."""

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
        _offers.add(self)

    def admit_all(self) -> None:
        """Who comes to form a group may come from a host that was not there when this was offered."""
        admit_all(self._listener)

    def admit_only(self, addresses: Iterable[str]) -> None:
        """Nobody else is to change what is in it."""
        admit_only(self._listener, addresses)

    @staticmethod
    def listeners() -> set[int]:
        """Those of all stores in this process."""
        return {offer._listener for offer in _offers}


_offers: weakref.WeakSet[Offer] = weakref.WeakSet()


class _Opening:
    """Connections are being made: all that were not there `before`."""

    def __init__(self, before: dict[str, int]) -> None:
        self.before = before

    def targets(self) -> dict[str, int]:
        new = {inode: fd for inode, fd in _sockets().items() if inode not in self.before}
        return {inode: fd for inode, fd in new.items() if _over_network(fd)}


class _Opened:
    """Connections that were made."""

    def __init__(self, sockets: dict[str, int]) -> None:
        self.sockets = sockets

    def targets(self) -> dict[str, int]:
        return self.sockets


class UnsupportedError(ValueError):
    """No group can be prepared beside the training here, whoever its members are."""


class Group:
    """The default process group of one epoch. `abort` and `intact` may be called from any thread, `form` and `leave` not."""

    def __init__(self, epoch: int, device: torch.device, backend: str) -> None:
        self.epoch = epoch
        self._device = device
        self._backend = backend
        # What an abort shuts down, replaced as a whole: another thread reads it at any moment.
        self._reach: _Opening | _Opened | None = None
        self._store: Any = None
        self._offer: Offer | None = None  # the store's server, on rank 0
        self.subgroups: Any = None  # made on demand
        self._aborting: threading.Thread | None = None
        self._made: Any = None  # gloo's half, if it was prepared
        self.peers: Collection[str] = ()  # the addresses of the other members, once it is formed
        self.settled = True  # no thread prepares it
        self._given_up = False

    def prepare(self, formation: Formation, offer: Offer | None) -> None:
        """Collective, in a thread beside the training: what takes time in `form`. Raises what torch raises, or ValueError.

        For gloo and the CPU only: NCCL's communicators are made by the first collective on the GPU that trains.
        """
        if self._backend != "gloo" or self._device.type != "cpu":
            raise UnsupportedError(f"{self._backend} on {self._device.type} is not prepared beside the training")
        self._reach = opening = _Opening(_sockets())
        store = self._open_store(formation, offer)
        if self._given_up:
            raise ValueError("it was given up")
        prefix = PrefixStore("prepared", store)
        self._made = dist.ProcessGroupGloo(prefix, formation.rank, formation.world_size, timeout=TIMEOUT)
        self._complete(opening)

    def form(
        self,
        formation: Formation,
        offer: Offer,
        start: Callable[[Callable[[], None]], Future[None]],
        waiting: Callable[[], object] = lambda: None,
    ) -> None:
        """Collective. Raises what torch raises if a member dies or the epoch is aborted meanwhile.

        `waiting()` is called now and then, and may raise: gloo cannot be woken where it waits for a peer to connect that
        never will, as there is no connection yet to shut down. So it waits in the thread of `start`, which can be left
        behind; nothing but that is lost.
        """
        made, self._made = self._made, None
        if made is not None:
            self._take_over(formation, made)
        elif self._device.type == "cuda":
            self._connect(formation, offer)
        else:
            connecting = start(lambda: self._connect(formation, offer))
            while not wait((connecting,), LOOK).done:
                waiting()
            connecting.result()
        offer.admit_only(self.peers if offer is self._offer else ())

    def _take_over(self, formation: Formation, made: Any) -> None:
        """What was prepared becomes torch's default group: init_process_group is given it where it would make one."""
        maker = dist.distributed_c10d.ProcessGroupGloo
        dist.distributed_c10d.ProcessGroupGloo = _Handover(made)
        try:
            self._init(formation)
        finally:
            dist.distributed_c10d.ProcessGroupGloo = maker

    def _connect(self, formation: Formation, offer: Offer) -> None:
        self._reach = opening = _Opening(_sockets())
        try:
            self._open_store(formation, offer)
            self._init(formation)
        except Exception as error:
            if isinstance(error, RuntimeError):
                raise
            # What torch makes of a store that somebody has changed: nothing that the user's program has raised.
            raise RuntimeError(f"the group could not be formed: {type(error).__name__}: {error}") from error
        self._complete(opening)

    def _complete(self, opening: _Opening) -> None:
        """All connections stand, and strangers have no business here any more. The store may get more from members."""
        sockets = opening.targets()
        self._reach = _Opened(sockets)
        self.peers = peers(sockets.values())
        if self._offer is not None:
            self._offer.admit_only(self.peers)
        self._close_doors(sockets.values())

    def _close_doors(self, descriptors: Iterable[int]) -> None:
        """Gloo makes a listener for each group, and no use of it once all members are connected."""
        # NCCL's are among them otherwise, and it connects when it first needs to; so does gloo if it is told to.
        if self._backend == "gloo" and not os.environ.get("TORCH_GLOO_LAZY_INIT"):
            for fd in set(listeners(descriptors)) - Offer.listeners():
                admit_only(fd, ())

    def _open_store(self, formation: Formation, offer: Offer | None) -> Any:
        """A client of rank 0's store. On rank 0 too: the server's own client must outlive an abort of this group."""
        if formation.rank == 0:
            if offer is None or offer.endpoint != formation.store:
                raise ValueError("the store that was offered is not there any more")
            offer.admit_all()
            self._offer = offer
        client = TCPStore(*parted(formation.store), is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        self._store = PrefixStore(f"epoch/{formation.epoch}", client)
        return self._store

    def _init(self, formation: Formation) -> None:
        # torch numbers groups, and the number is in the store's keys; a forming that failed has used one up here only.
        dist.distributed_c10d._world.group_count = 0
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
        self._made = self._store = self._offer = None

    def abort(self) -> None:
        """Make every rank that blocks in this group raise. To be repeated until it has left: it may still be forming."""
        reach = self._reach
        if reach is None:
            return
        targets = reach.targets()
        if self._reach is not reach:  # left meanwhile: what was listed may belong to the next epoch
            return
        for inode, fd in targets.items():
            _shut_down(fd, inode)
        if isinstance(reach, _Opened) and self._device.type == "cuda" and self._aborting is None:
            # It may wait as long as the group's time-out; the caller's patience is shorter.
            self._aborting = threading.Thread(target=self._abort_nccl, name="nbelastic-abort", daemon=True)
            self._aborting.start()

    def _abort_nccl(self) -> None:
        torch.cuda.set_device(self._device)  # or the abort opens a context on GPU 0
        dist.distributed_c10d._abort_process_group()

    @contextlib.contextmanager
    def extending(self) -> Iterator[None]:
        """Connections that are opened inside belong to this epoch too: subgroups are aborted with it."""
        known = self._reach.targets() if self._reach is not None else {}
        before = {inode: fd for inode, fd in _sockets().items() if inode not in known}
        self._reach = opening = _Opening(before)
        try:
            yield
        finally:
            self._reach = _Opened(opening.targets())
            self._close_doors(self._reach.sockets.values())

    def intact(self) -> bool:
        """Whether every connection of the formed group still stands: then no collective failed for a peer's sake."""
        if not isinstance(self._reach, _Opened):
            return False
        now = _sockets()
        poll = select.poll()
        for inode, fd in self._reach.sockets.items():
            if now.get(inode) != fd:
                return False
            poll.register(fd, select.POLLRDHUP)
        return not poll.poll(0)

    def connections(self) -> Collection[str]:
        """Those that are open, by inode."""
        reach = self._reach
        return reach.targets().keys() if reach is not None else ()

    def leave(self, *, sparing: Collection[str] = ()) -> None:
        """Close it. The connections first, but for these: two ranks that leave on their own could wait for each other."""
        if isinstance(self._reach, _Opened):
            kept = {inode: fd for inode, fd in self._reach.sockets.items() if inode not in sparing}
            self._reach = _Opened(kept)
        self.abort()
        if self._aborting is not None:
            self._aborting.join(NCCL_PATIENCE)
            if self._aborting.is_alive():  # nothing on this GPU will move again in this process
                os._exit(STUCK)
        _kept.append([*dist.distributed_c10d._world.pg_map, self._store, self._offer])
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # an aborted group has nothing left to shut down in order
                dist.destroy_process_group()
        self._store = self._offer = self.subgroups = None
        self._reach = None
        if len(_kept) > KEPT:
            threading.Thread(target=_kept.popleft().clear, name="nbelastic-drop", daemon=True).start()


class _Handover:
    """Stands in for the class of gloo's groups: to make one is to get the one that was made before."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._made

    def __instancecheck__(self, thing: Any) -> bool:
        return thing is self._made


def collectives() -> int:
    """How many operations the groups of this process have begun so far: their sequence numbers together."""
    return sum(_begun(group) for group in dist.distributed_c10d._world.pg_map)


def collectives_of_all() -> int:
    """Those of the default group, in which every rank takes part: who has begun fewer than another is behind it."""
    return _begun(dist.group.WORLD) if dist.group.WORLD is not None else 0


def _begun(group: Any) -> int:
    kinds = {str(kind.type) for kind in group._device_types}
    return sum(int(group._get_backend(torch.device(kind))._get_sequence_number_for_group()) for kind in kinds)


def _sockets() -> dict[str, int]:
    """The sockets of this process: `socket:[inode]` -> file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[target] = int(name)
    return found


def _over_network(fd: int) -> bool:
    """Whether it is no socket between processes of this machine, such as a data loader's."""
    try:
        duplicate = socket.socket(fileno=os.dup(fd))
    except OSError:  # closed
        return False
    with duplicate:
        return duplicate.family in (socket.AF_INET, socket.AF_INET6)


def _shut_down(fd: int, inode: str) -> None:
    """Shut a connection down, never a listener: the process's gloo device shares it with the next epoch.

    The descriptor may have been closed and given to another file meanwhile: only the duplicate's own inode counts.
    """
    try:
        duplicate = os.dup(fd)
    except OSError:  # closed
        return
    if f"socket:[{os.fstat(duplicate).st_ino}]" != inode:
        os.close(duplicate)
        return
    with contextlib.suppress(OSError), socket.socket(fileno=duplicate) as connection:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)
