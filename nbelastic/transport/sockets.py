"""What both ends of the link share: ZeroMQ options, limits, and the name of an agent's relay socket."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import zmq

HEARTBEAT = 1.0  # default seconds between heartbeats, in both directions

MAX_MESSAGE = 1 << 20  # bytes; a longer one to the driver is dropped

# Bytes of a frame, also before the handshake: the server closes a connection that sends more.
MAX_TO_DRIVER = 2 * MAX_MESSAGE

CLOSE_LINGER = 500  # milliseconds for an end that closes to send its queue

RETRANSMIT = 2.5  # heartbeats after which an unacknowledged message is retransmitted
MAX_UNREAD = 10.0  # heartbeats more while its acknowledgement may be unread

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


def bind(socket: zmq.Socket[bytes], host: str, ports: Sequence[int | str]) -> str:
    """Bind to the first of these ports that is free, and return the address; `*` is any. ZMQError if none is."""
    for port in ports:
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or port == ports[-1]:
                raise
        else:
            break
    chosen = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"tcp://{host}:{chosen}"  # ZeroMQ would call it [::ffff:127.0.0.1]


def relay_endpoint(folder: Path, at_end: contextlib.ExitStack) -> str:
    """The endpoint of the relay socket in `folder`, by descriptor: its full path may be too long for a unix socket."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    at_end.callback(os.close, fd)
    return f"ipc:///proc/self/fd/{fd}/{RELAY}"
