"""What both ends of the link share: ZeroMQ options, limits, and the name of an agent's relay socket."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import zmq

HEARTBEAT = 1.0  # default seconds between heartbeats, in both directions

MAX_MESSAGE = 1 << 20  # bytes; a longer one to the driver is dropped

# Bytes of a frame, also before the handshake: the server closes a connection that sends more.
MAX_TO_DRIVER = 2 * MAX_MESSAGE

CLOSE_LINGER = 500  # milliseconds for an end that closes to send its queue

RETRANSMIT = 2.5  # heartbeats after which an unacknowledged message is retransmitted

BATCH, TURN = 256, 0.01  # messages and seconds after which a reader yields

RELAY = "relay"  # the name of an agent's socket for the processes of its host

DISCONNECTED = [b""]  # sent by a relay that has no connection to the driver

# A heartbeat for a process behind a relay that has sent no message since the last head: one for all of a host.
HEARD = b"+"

MAX_READ = 16 * MAX_MESSAGE  # bytes; ZeroMQ closes a connection that sends a longer message

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
    """The endpoint of the relay socket in `folder`, by descriptor: its full path may be too long for a unix socket."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    at_end.callback(os.close, fd)
    return f"ipc:///proc/self/fd/{fd}/{RELAY}"
