"""What both ends of the link share: ZeroMQ options, limits, and the name of an agent's relay socket."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import zmq

HEARTBEAT = 1.0  # seconds between heartbeats, both ways, unless told otherwise

MAX_MESSAGE = 1 << 20  # bytes; a longer one is dropped

CLOSE_LINGER = 500  # milliseconds for the last words of an end that closes

RETRANSMIT = 2.5  # heartbeats after which what nobody has confirmed is sent again

BATCH, TURN = 256, 0.01  # messages, and seconds, after which a reader lets others have their turn

RELAY = "relay"  # an agent's socket for the processes of its host

DISCONNECTED = [b""]  # what a relay sends instead of an answer: it has no connection to the driver

MAX_READ = 16 * MAX_MESSAGE  # a message of this size is not even read: it closes the sender's connection

SOCKET_OPTIONS = {
    zmq.LINGER: CLOSE_LINGER,
    zmq.HANDSHAKE_IVL: 10000,
    zmq.MAXMSGSIZE: MAX_READ,
    zmq.HEARTBEAT_IVL: 2000,
    zmq.HEARTBEAT_TIMEOUT: 10000,
    zmq.SNDHWM: 10000,
    zmq.RCVHWM: 10000,
    zmq.IPV6: 1,
}


def relay_endpoint(folder: Path, at_end: contextlib.ExitStack) -> str:
    """The relay's in this folder: the full path may be longer than a socket's may be."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    at_end.callback(os.close, fd)
    return f"ipc:///proc/self/fd/{fd}/{RELAY}"
