"""Opens the TCP connection that carries a host's tunnel to the driver's machine, and opens it again when it has ended."""

from __future__ import annotations

import errno
import os
import socket
import time

from nbelastic.system.backoff import Backoff
from nbelastic.tunnel import handshake
from nbelastic.tunnel.forwarder import WRITE, Forwarder
from nbelastic.tunnel.frames import PREAMBLE, Frame, Kind

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between two tries
CONNECT_TIMEOUT = 10.0  # seconds
# A connection that is dead ends: after so many milliseconds if bytes wait for an acknowledgement, else at about the same time.
OPTIONS = (
    (socket.TCP_USER_TIMEOUT, 10_000),
    (socket.TCP_KEEPIDLE, 5),
    (socket.TCP_KEEPINTVL, 2),
    (socket.TCP_KEEPCNT, 3),
)


class Dialer:
    """`address`: where the driver's TCP proxy listens. `key`: of the handshake. `name`: of the tunnel, see `ended_tunnels`.

    Call `turn` before each turn of the forwarder.
    """

    def __init__(self, forwarder: Forwarder, address: tuple[str, int], key: bytes, name: bytes) -> None:
        self._forwarder, self._address, self._key, self._name = forwarder, address, key, name
        self._challenge = b""  # as far as the proxy has sent it
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._connection: socket.socket | None = None  # that is being opened
        self._next_at = 0.0  # when the next try begins; while one is made, when it has failed
        self._attached_at: float | None = None

    def turn(self, now: float) -> float:
        """Do what is due. Return after how many seconds something may be due again."""
        if self._forwarder.attached:
            self._attached_at = self._attached_at or now
            return LONGEST_PAUSE
        if self._attached_at is not None:
            if now - self._attached_at > LONGEST_PAUSE:
                self._backoff.reset()
            self._attached_at, self._next_at = None, now + self._backoff.next()
        if now >= self._next_at:
            if self._connection is None:
                self._begin(now)
            else:
                self._fail(now)
        return max(0.0, self._next_at - now)

    def _begin(self, now: float) -> None:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        try:
            self._connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:  # this process has too many descriptors
            self._next_at = now + self._backoff.next()
            return
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in OPTIONS:
            self._connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._next_at = now + CONNECT_TIMEOUT
        if self._connection.connect_ex(self._address) in (0, errno.EINPROGRESS):
            self._forwarder.watch(self._connection.fileno(), self._connected, WRITE)
        else:
            self._fail(now)

    def _connected(self) -> None:
        assert self._connection is not None
        if self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._fail(time.monotonic())
            return
        self._forwarder.unwatch(self._connection.fileno())
        self._challenge = b""
        try:
            self._connection.send(PREAMBLE)  # a new connection has room for it
        except OSError:
            self._fail(time.monotonic())
        else:
            self._forwarder.watch(self._connection.fileno(), self._on_challenge)

    def _on_challenge(self) -> None:
        """Answer the challenge once it is complete, and begin with the frames."""
        assert self._connection is not None
        try:
            data = self._connection.recv(handshake.SIZE - len(self._challenge))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._fail(time.monotonic())
            return
        self._challenge += data
        if len(self._challenge) == handshake.SIZE:
            self._attach(self._connection)

    def _attach(self, connection: socket.socket) -> None:
        """Let the forwarder use the connection."""
        try:
            writer = os.dup(connection.fileno())
        except OSError:  # this process has too many descriptors
            self._fail(time.monotonic())
            return
        self._connection, self._attached_at = None, time.monotonic()  # it may break at once
        self._forwarder.unwatch(connection.fileno())
        self._forwarder.attach(connection.detach(), writer, handshake.answer_to(self._challenge, self._key))
        self._forwarder.send(Frame(Kind.NAME, payload=self._name))

    def _fail(self, now: float) -> None:
        assert self._connection is not None
        self._forwarder.unwatch(self._connection.fileno())
        self._connection.close()
        self._connection, self._next_at = None, now + self._backoff.next()
