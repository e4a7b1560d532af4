"""What the driver's machine allows its tunnels: the key that hosts must know, and the loopback ports to which tunnels may lead."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

import msgspec


class Allowed(msgspec.Struct, frozen=True):
    """The content of the file. `key`: of `handshake`, in hex."""

    key: str
    ports: tuple[int, ...] = ()


def read(file: Path) -> Allowed | None:
    """None if the file is not there yet, or is broken."""
    with suppress(OSError, msgspec.DecodeError, ValueError):
        allowed = msgspec.json.decode(file.read_bytes(), type=Allowed)
        bytes.fromhex(allowed.key)
        return allowed
    return None


def connect(file: Path, port: int) -> socket.socket | None:
    """A connection to `port`; None if the file does not list it, or if too many connections wait there."""
    allowed = read(file)
    if allowed is None or port not in allowed.ports:
        return None
    with suppress(OSError):
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with suppress(BlockingIOError):
            connection.connect(("127.0.0.1", port))
        return connection
    return None
