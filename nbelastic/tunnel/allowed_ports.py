"""What the driver's machine allows its tunnels: the key that hosts must know, and the loopback ports to which tunnels may lead."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from nbelastic.tunnel.strangers import most_channels


class Allowed(msgspec.Struct, frozen=True):
    """The content of the file. `key`: of `handshake`, in hex. `engines`: the most workers of a host that connect to ipyparallel."""

    key: str
    ports: tuple[int, ...] = ()
    engines: int = 0


def read(file: Path) -> Allowed | None:
    """None if the file is not there yet, or is broken."""
    with suppress(OSError, msgspec.DecodeError, ValueError):
        allowed = msgspec.json.decode(file.read_bytes(), type=Allowed)
        bytes.fromhex(allowed.key)
        return allowed
    return None


def connect(file: Path, port: int, channels: int) -> socket.socket | None:
    """A connection to `port`; None if the file does not list it, or if too many connections wait there.

    None too if the tunnel has too many `channels` to that port already.
    """
    allowed = read(file)
    if allowed is None or port not in allowed.ports or channels >= most_channels(allowed.engines):
        return None
    with suppress(OSError):
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with suppress(BlockingIOError):
            connection.connect(("127.0.0.1", port))
        return connection
    return None
