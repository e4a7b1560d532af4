"""How a TCP proxy reports to the driver that a host's tunnel has ended: by a datagram in the run folder, which is private.

A host says in its tunnel which agent it has. If all its processes are killed, its system closes the tunnel. Then the driver need not
wait for a silence.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from nbelastic.system.private_sockets import bind_in, connect_in

SOCKET = "ended-tunnels"
MOST = 1 << 10  # bytes of a name


def name_of(host: str, agent: int) -> bytes:
    """What a host says in its tunnel. `agent`: the number of its agent."""
    return f"{agent} {host}".encode()


def listen(folder: Path) -> socket.socket:
    """The driver's end, without blocking. Another driver may have had it before."""
    listener = bind_in(folder, SOCKET, socket.SOCK_DGRAM)
    listener.setblocking(False)
    return listener


def report(folder: Path, name: bytes) -> bool:
    """The tunnel with this name has ended. Returns False if the driver has to read earlier reports first. There may be none."""
    try:
        with connect_in(folder, SOCKET, socket.SOCK_DGRAM) as connection:
            connection.send(name, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def read(listener: socket.socket) -> tuple[str, int] | None:
    """The next host and the number of its agent; None if it cannot be read."""
    with suppress(OSError, ValueError):
        number, _, host = listener.recv(MOST).decode().partition(" ")
        return host, int(number)
    return None
