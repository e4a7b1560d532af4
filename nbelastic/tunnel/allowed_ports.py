"""Connections to those loopback ports of the driver's machine to which tunnels may lead."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from pathlib import Path


def connect(ports: Path, port: int) -> socket.socket | None:
    """A connection to `port`; None if the file `ports` does not list it, or if too many connections wait there."""
    with suppress(OSError, ValueError):
        if port in json.loads(ports.read_text()):
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            with suppress(BlockingIOError):
                connection.connect(("127.0.0.1", port))
            return connection
    return None
