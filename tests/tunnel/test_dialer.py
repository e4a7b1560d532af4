"""The dialer of a host's tunnel, while its process has no descriptor left."""

import contextlib
import errno
import os
import socket
import struct
import time

import pytest

from nbelastic.system.private_sockets import bind_in
from nbelastic.tunnel import dialer, handshake
from nbelastic.tunnel.dialer import Dialer
from nbelastic.tunnel.forwarder import Forwarder
from tests.support.waiting import until


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def fails(*_):
    raise OSError(errno.EMFILE, "Too many open files")


class Dialled:
    """A dialer, and a proxy that sends a challenge to each connection."""

    def __init__(self, proxy):
        self.forwarder = Forwarder(lambda _: None, lambda *_: None)
        self.proxy, self.accepted = proxy, []
        proxy.setblocking(False)
        self.dialer = Dialer(self.forwarder, proxy.getsockname(), b"key", b"1 h")

    def turn(self):
        self.forwarder.turn(min(0.05, self.dialer.turn(time.monotonic())))
        with contextlib.suppress(BlockingIOError):
            self.accepted.append(self.proxy.accept()[0])
            self.accepted[-1].sendall(bytes(handshake.SIZE))

    def until_attached(self):
        until(lambda: self.turn() or self.forwarder.attached, 5, "the next try")

    def hang_up(self):
        """The proxy closes all connections."""
        for each in self.accepted:
            each.close()
        self.accepted.clear()


@pytest.fixture
def dialled(monkeypatch):
    monkeypatch.setattr(dialer, "FIRST_PAUSE", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        both = Dialled(proxy)
        yield both
        both.forwarder.close()
        both.hang_up()


@pytest.mark.parametrize("where", ["the socket", "its copy"])
def test_a_host_without_a_free_descriptor_dials_again(dialled, monkeypatch, where):
    """Its process goes on, no descriptor is lost, and a later try succeeds."""
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(*((dialer.socket, "socket") if where == "the socket" else (dialer.os, "dup")), fails)
        for _ in range(10):
            dialled.turn()
    assert not dialled.forwarder.attached
    dialled.until_attached()
    reader_and_writer = 2
    assert descriptors() == before + reader_and_writer + len(dialled.accepted)


def test_a_proxy_that_hangs_up_after_its_challenge_is_dialled_again(dialled):
    """The answer cannot be sent. The next try comes after the usual pause, and not after the time that a connect may take."""
    until(lambda: dialled.turn() or dialled.accepted, 5, "a connection")
    dialled.accepted[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    dialled.hang_up()
    until(lambda: dialled.turn() or dialled.accepted, 5, "another connection")
    dialled.until_attached()


def test_a_private_socket_that_cannot_be_made_leaves_no_descriptor(tmp_path, monkeypatch):
    """The folder is open for a moment only."""
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", fails)
        with pytest.raises(OSError, match="Too many"):
            bind_in(tmp_path, "name")
    assert descriptors() == before
