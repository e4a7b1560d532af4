"""The connections of one generation's process groups, identified by the addresses at their ends.

Other threads of the program may open connections at any moment, also while a group forms: those are never ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Collection, Iterable, Iterator

Endpoint = tuple[str, int]  # address and port
_NETWORK = (socket.AF_INET, socket.AF_INET6)


class Connections:
    """Sockets opened after this was made that are at one of `listeners`, or connected with one."""

    def __init__(self) -> None:
        self._ended: dict[str, socket.socket] = {}  # by inode, what keeps the connection open
        # By inode, both ends of those that were connected: they stay what they are. Of a listener, its own.
        self._ends: dict[str, tuple[Endpoint, ...]] = {}
        self.before = open_sockets()
        self.listeners: frozenset[Endpoint] = frozenset()  # of all members, and the store's

    def now(self) -> dict[str, int]:
        """The open ones: `socket:[inode]` -> file descriptor. In any thread."""
        new = {inode: fd for inode, fd in open_sockets().items() if inode not in self.before}
        for inode, fd in new.items():
            if inode not in self._ends:
                # With their addresses: a listener at another one, such as NCCL's or the user's, may have the same port.
                ends = ends_of(fd, inode)
                if not self.listeners.isdisjoint(ends):
                    self._ends[inode] = ends
        return {inode: fd for inode, fd in new.items() if inode in self._ends}

    def peers(self, inodes: Iterable[str]) -> frozenset[str]:
        """The addresses at both ends of these connections: peers on this machine may use any of its addresses."""
        return frozenset(address for ends in self._connected(inodes) for address, _ in ends)

    def count(self, inodes: Iterable[str], to: Collection[Endpoint]) -> int:
        """How many of these connections have one end at an endpoint in `to`."""
        return sum(any(end in to for end in ends) for ends in self._connected(inodes))

    def _connected(self, inodes: Iterable[str]) -> Iterator[tuple[Endpoint, ...]]:
        """Both ends of each, but of listeners, and of those that had lost the other end when they were found."""
        return (self._ends[inode] for inode in inodes if len(self._ends[inode]) > 1)

    def end(self, sockets: dict[str, int]) -> None:
        """Let each operation on these raise: gloo reads the end of the data, and closes its descriptor. In any thread.

        A connection stays open until `close`, so that the other rank can go on writing to it. Gloo does not report a write
        that fails (`Pair::write` returns as if it had to wait, `Pair::signalException` passes over its transmit queue):
        that rank would wait without end.
        """
        for inode, fd in sockets.items():
            if inode not in self._ended:
                ended = end_reading(fd, inode)
                if ended is not None:
                    self._ended[inode] = ended

    def close(self) -> None:
        """Close those that were ended: no other rank is to use them any more. In any thread.

        They are shut down first, as a forked child may have their descriptors.
        """
        ended, self._ended = self._ended, {}
        for connection in ended.values():
            with connection, contextlib.suppress(OSError):  # the other end has gone
                connection.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        for connection in self._ended.values():
            connection.close()


def open_sockets() -> dict[str, int]:
    """The sockets of this process: `socket:[inode]` -> file descriptor."""
    found: dict[str, int] = {}
    folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in os.listdir(folder):
            try:
                target = os.readlink(name, dir_fd=folder)  # not os.fstat: it waits for a network file system
            except OSError:
                continue
            if target.startswith("socket:"):  # the higher ones are duplicates: see `borrowed`
                found[target] = min(int(name), found.get(target, int(name)))
    finally:
        os.close(folder)
    return found


def listeners(descriptors: Iterable[int]) -> dict[int, Endpoint]:
    """The listening network sockets among `descriptors`, with the endpoint of each."""
    found = {}
    for fd in descriptors:
        with borrowed(fd) as ours:
            if ours is not None and ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[fd] = endpoint(*ours.getsockname())
    return found


def ends_of(fd: int, inode: str = "") -> tuple[Endpoint, ...]:
    """The endpoints of a network socket: its own, and that of the other end if it is connected. None: as in `borrowed`."""
    ends = []
    with borrowed(fd, inode) as ours, contextlib.suppress(OSError):  # not connected any more, or not yet
        if ours is not None:
            ends.append(endpoint(*ours.getsockname()))
            ends.append(endpoint(*ours.getpeername()))
    return tuple(ends)


def end_reading(fd: int, inode: str) -> socket.socket | None:
    """Let a thread that reads this connection read its end. Returns a duplicate, which keeps it open; None: it is closed.

    Never a listener: the next generation uses the listener of the process's gloo device too. The descriptor may belong to
    another file by now, so compare the inode of a duplicate.
    """
    with borrowed(fd, inode) as connection, contextlib.suppress(OSError):
        if connection is not None and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RD)
            return _as_it_is(connection.detach())  # not `dup`: it would make the connection blocking, for gloo too
    return None


@contextlib.contextmanager
def borrowed(fd: int, inode: str = "") -> Iterator[socket.socket | None]:
    """A Python socket over a duplicate of `fd`; None if `fd` is not a network socket, or not the one of `inode` any more."""
    try:
        copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, fd + 1)  # a higher number: `open_sockets` takes the lowest
    except OSError:  # closed
        yield None
        return
    same = not inode or f"socket:[{os.fstat(copy).st_ino}]" == inode
    try:
        ours = _as_it_is(copy)
    except OSError:
        os.close(copy)
        yield None
        return
    with ours:
        yield ours if same and ours.family in _NETWORK else None


def _as_it_is(fd: int) -> socket.socket:
    """A Python socket over `fd`, which stays blocking, or not, as it is: any other type obeys `socket.setdefaulttimeout`."""
    return socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=fd)


def endpoint(address: object, port: object, *_: object) -> Endpoint:
    """The endpoint from a socket's name: without a zone, and IPv4 addresses as such also from an IPv6 socket."""
    return str(address).partition("%")[0].removeprefix("::ffff:"), int(str(port))
