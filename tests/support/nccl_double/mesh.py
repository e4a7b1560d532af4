"""The connections of one communicator: a socket for each pair of ranks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

POLL = 0.002  # seconds between two looks at the store
POLL_CONNECTING = 0.1  # seconds between two looks at the clock, while this connects
MACHINE = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

Transfer = tuple[int, torch.Tensor]  # the peer's rank, and a contiguous tensor to send or to fill


class Aborted(Exception):
    """The communicator was aborted while this waited."""


class PeerLost(Exception):
    """A peer has closed its connection."""


class Mesh:
    """`begin`, `connect` and `exchange` are for one thread at a time, `abort` is for any other."""

    def __init__(self, rank: int, size: int, *, blocking: bool) -> None:
        self.rank, self.size = rank, size
        self._blocking = blocking  # then `connect` has no timeout
        self._listener: socket.socket | None = None  # from `begin` to the end of `connect`
        self._until = 0.0  # when `connect` has taken too long
        self._peers: dict[int, socket.socket] = {}
        self._is_aborted = threading.Event()
        self._lock = threading.Lock()
        self._wakes = -1  # an eventfd, from `connect` to `close`

    def begin(self, store: Any) -> None:
        """Listen, and tell the others where. It waits for rank 0 alone, as for NCCL's unique id: the end of the store wakes it."""
        with self._lock:
            self._wakes = os.eventfd(int(self._is_aborted.is_set()))
        self._listener = socket.create_server((_address(), 0), backlog=self.size)
        host, port = self._listener.getsockname()[:2]
        if self.rank == 0:
            store.set("token", secrets.token_hex(8))
        store.get("token")
        name = {"host": host, "port": port, "gpu": gpu(), "machine": MACHINE}
        store.set(f"member/{self.rank}", json.dumps(name))

    def connect(self, store: Any, timeout: float) -> None:
        """Collective; no abort reaches it. RuntimeError if two ranks use the same GPU; PeerLost; TimeoutError."""
        self._until = math.inf if self._blocking else time.monotonic() + timeout
        assert self._listener is not None
        with self._listener as listener:
            token, members = store.get("token"), self._names(store)
            _refuse_duplicates(members)
            for peer, member in enumerate(members[: self.rank]):
                self._peers[peer] = self._reach(member["host"], member["port"], token)
            while len(self._peers) < self.size - 1:
                if self._wait([listener], connecting=True):
                    self._accept(listener, token)
        for connection in self._peers.values():
            connection.setblocking(False)
        everybody = [peer for peer in range(self.size) if peer != self.rank]
        byte = torch.zeros(1, dtype=torch.uint8)
        both = [(peer, byte) for peer in everybody]
        self._exchange(both, both, connecting=True)

    def _names(self, store: Any) -> list[dict[str, Any]]:
        keys = [f"member/{rank}" for rank in range(self.size)]
        try:
            while not store.check(keys):
                self._pause(POLL)
            return [json.loads(text) for text in store.multi_get(keys)]
        except RuntimeError:  # rank 0 has the store; NCCL's own connections would not tell that it is lost
            self._pause(math.inf)
            raise

    def _pause(self, seconds: float) -> None:
        """Sleep while this connects. TimeoutError when that has taken too long."""
        time.sleep(min(seconds, max(0.0, self._until - time.monotonic()), 3600))
        if time.monotonic() >= self._until:
            raise TimeoutError("timeout")
        if seconds == math.inf:
            self._pause(seconds)

    def _reach(self, host: str, port: int, token: bytes) -> socket.socket:
        while True:
            try:
                connection = socket.create_connection((host, port))
                connection.sendall(token + self.rank.to_bytes(4))
            except OSError:  # the peer has ended
                self._pause(math.inf)
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection

    def _accept(self, listener: socket.socket, token: bytes) -> None:
        connection, _ = listener.accept()
        while not self._wait([connection], connecting=True):
            continue
        with contextlib.suppress(OSError):
            hello = connection.recv(len(token) + 4, socket.MSG_WAITALL)
            if hello[:-4] == token:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._peers[int.from_bytes(hello[-4:])] = connection
                return
        connection.close()

    def _wait(self, readable: Iterable[Any], writable: Iterable[Any] = (), *, connecting: bool = False) -> set[int]:
        """The descriptors among these that are ready. Raises Aborted or, while this connects, TimeoutError."""
        poll = select.poll()
        for one in writable:
            poll.register(one, select.POLLOUT)
        for one in readable:
            poll.register(one, select.POLLIN | (select.POLLOUT if one in writable else 0))
        if not connecting:
            poll.register(self._wakes, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(POLL_CONNECTING * 1000 if connecting else None)}
        if connecting:
            self._pause(0)
        if self._wakes in ready:
            raise Aborted
        return ready

    def exchange(self, sends: Iterable[Transfer], receives: Iterable[Transfer]) -> None:
        """Send and receive all of these at once. Raises Aborted or PeerLost."""
        self._exchange(sends, receives)

    def _exchange(self, sends: Iterable[Transfer], receives: Iterable[Transfer], *, connecting: bool = False) -> None:
        out, into = _queues(sends), _queues(receives)
        while out or into:
            moved = False
            for peer in [*out]:
                moved |= self._move(peer, out, send=True)
            for peer in [*into]:
                moved |= self._move(peer, into, send=False)
            if not moved and (out or into):
                self._wait([self._peers[p] for p in into], [self._peers[p] for p in out], connecting=connecting)
            if self._is_aborted.is_set() and not connecting:
                raise Aborted

    def _move(self, peer: int, queues: dict[int, deque[memoryview]], *, send: bool) -> bool:
        """Send or receive as much as is possible now; whether that was anything."""
        connection, views = self._peers[peer], queues[peer]
        try:
            count = connection.send(views[0]) if send else connection.recv_into(views[0])
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLost(f"remote error: rank {peer}: {error.strerror}") from error
        if count == 0:
            raise PeerLost(f"remote error: rank {peer} has closed its connection")
        views[0] = views[0][count:]
        if not views[0]:
            views.popleft()
            if not views:
                del queues[peer]
        return True

    def abort(self) -> None:
        """End what waits in any thread, with Aborted."""
        with self._lock:
            self._is_aborted.set()
            if self._wakes >= 0:
                os.eventfd_write(self._wakes, 1)

    def close(self) -> None:
        """Close the connections: nothing waits in them any more."""
        for connection in [*self._peers.values(), *filter(None, [self._listener])]:
            connection.close()
        with self._lock:
            if self._wakes >= 0:
                os.close(self._wakes)
            self._wakes = -1


def _queues(transfers: Iterable[Transfer]) -> dict[int, deque[memoryview]]:
    queues: dict[int, deque[memoryview]] = {}
    for peer, tensor in transfers:
        if tensor.numel():
            data = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
            queues.setdefault(peer, deque()).append(data)
    return queues


def _refuse_duplicates(members: list[dict[str, Any]]) -> None:
    seen: dict[tuple[str, str], int] = {}
    for rank, member in enumerate(members):
        first = seen.setdefault((member["machine"], member["gpu"]), rank)
        if first != rank:
            raise dist.DistBackendError(
                f"ncclInvalidUsage: Duplicate GPU detected : rank {rank} and rank {first} both on CUDA device {member['gpu']}"
            )


def gpu() -> str:
    """The one that this process uses: the first that it sees."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


def _address() -> str:
    """Of NCCL's interface, as its environment says."""
    name = os.environ.get("NCCL_SOCKET_IFNAME", "lo").removeprefix("=") or "lo"
    return next(one.address for one in psutil.net_if_addrs()[name] if one.family == socket.AF_INET)
