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
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from nbelastic.core.messages import STUCK, Formation

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
        before = _sockets()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((address, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        self.endpoint = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self.store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=TIMEOUT
        )
        self.sockets = _sockets().keys() - before.keys()  # its owner is a client of it, too


class _Opening:
    """Connections are being made: all that were not there `before`."""

    def __init__(self, before: dict[str, int]) -> None:
        self.before = before

    def targets(self) -> dict[str, int]:
        return {inode: fd for inode, fd in _sockets().items() if inode not in self.before}


class _Opened:
    """Connections that were made."""

    def __init__(self, sockets: dict[str, int]) -> None:
        self.sockets = sockets

    def targets(self) -> dict[str, int]:
        return self.sockets


class Group:
    """The default process group of one epoch. `abort` and `intact` may be called from any thread, `form` and `leave` not."""

    def __init__(self, epoch: int, device: torch.device, backend: str) -> None:
        self.epoch = epoch
        self._device = device
        self._backend = backend
        # What an abort shuts down, replaced as a whole: another thread reads it at any moment.
        self._reach: _Opening | _Opened | None = None
        self._store: Any = None
        self.subgroups: Any = None  # made on demand
        self._aborting: threading.Thread | None = None

    def form(self, formation: Formation, offer: Offer, waiting: Callable[[], object] = lambda: None) -> None:
        """Collective. Raises what torch raises if a member dies or the epoch is aborted meanwhile.

        `waiting()` is called now and then, and may raise: gloo cannot be woken where it waits for a peer to connect that
        never will, as there is no connection yet to shut down. So it waits in a thread that can be given up; nothing but
        that thread is lost.
        """
        if self._device.type == "cuda":
            self._connect(formation, offer)
            return
        failed: list[BaseException] = []
        over = threading.Event()

        def connect() -> None:
            try:
                self._connect(formation, offer)
            except BaseException as error:  # noqa: BLE001  (it is raised below)
                failed.append(error)
            finally:
                over.set()

        threading.Thread(target=connect, name="nbelastic-forming", daemon=True).start()
        while not over.wait(LOOK):
            waiting()
        if failed:
            raise failed.pop()

    def _connect(self, formation: Formation, offer: Offer) -> None:
        mine = offer.sockets if formation.rank == 0 else ()
        self._reach = opening = _Opening({inode: fd for inode, fd in _sockets().items() if inode not in mine})
        host, _, port = formation.store.rpartition(":")
        self._store = offer.store
        if formation.rank != 0:
            self._store = TCPStore(
                host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=TIMEOUT
            )
        # torch numbers groups, and the number is in the store's keys; a forming that failed has used one up here only.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            self._backend,
            store=PrefixStore(f"epoch/{formation.epoch}", self._store),
            rank=formation.rank,
            world_size=formation.world_size,
            timeout=TIMEOUT,
            device_id=self._device if self._device.type == "cuda" else None,
        )
        self._reach = _Opened(opening.targets())

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

    def leave(self) -> None:
        """Close it. The connections first: two ranks that leave on their own could wait for each other."""
        self.abort()
        if self._aborting is not None:
            self._aborting.join(NCCL_PATIENCE)
            if self._aborting.is_alive():  # nothing on this GPU will move again in this process
                os._exit(STUCK)
        _kept.append([*dist.distributed_c10d._world.pg_map, self._store])
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # an aborted group has nothing left to shut down in order
                dist.destroy_process_group()
        self._store = self.subgroups = None
        self._reach = None
        if len(_kept) > KEPT:
            threading.Thread(target=_kept.popleft().clear, name="nbelastic-drop", daemon=True).start()


def collectives() -> int:
    """How many operations the groups of this process have begun so far: their sequence numbers together."""
    return sum(
        group._get_backend(torch.device(kind))._get_sequence_number_for_group()
        for group in dist.distributed_c10d._world.pg_map
        for kind in {str(kind.type) for kind in group._device_types}
    )


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
