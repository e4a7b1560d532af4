"""Hosts' tunnels to the TCP proxy: who may open one, where its channels lead, and how many an address gets."""

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest

from nbelastic.tunnel import ended_tunnels, handshake
from nbelastic.tunnel.frames import NUMBER, PREAMBLE, Decoder, Frame, Kind, encode
from nbelastic.tunnel.strangers import CHANNELS, CHANNELS_PER_ENGINE, SERVER_PART, STRANGER_PART, most_channels
from nbelastic.tunnel.tcp_proxy_process import MOST_CHANNELS_PER_PEER, MOST_PER_PEER
from tests.tunnel.echo_server import echo_server
from tests.tunnel.proxies import KEY, connect, is_closed, is_echoed, open_proxy

ONE_PORT = NUMBER.pack(1)


class Tunnel:
    """A host's end of a tunnel, which sends what a test wants."""

    def __init__(self, proxy_address, source=None, key=KEY):
        self.connection = connect(proxy_address, source)
        self.connection.sendall(PREAMBLE)
        challenge = self.connection.recv(handshake.SIZE, socket.MSG_WAITALL)
        self.connection.sendall(handshake.answer_to(challenge, key))
        self._decoder = Decoder(begun=True)
        self.frames = []

    def send(self, kind, channel, payload=b""):
        self.connection.sendall(encode(Frame(kind, channel, payload)))

    def open(self, channel, port):
        self.send(Kind.OPEN, channel, NUMBER.pack(port))

    def receive(self, count=1):
        """The next frames, without those that only give credit."""
        while len(self.frames) < count:
            data = self.connection.recv(1 << 16)
            assert data, "the proxy has closed the tunnel"
            self.frames += [frame for frame in self._decoder.feed(data) if frame.kind != Kind.CREDIT]
        taken, self.frames = self.frames[:count], self.frames[count:]
        return taken

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()


def test_one_port_for_all_connections_of_a_host(driver_lease):
    """The channels of a tunnel lead to the ports that the file lists, and to no other, not even the server's."""
    with (
        echo_server() as server,
        echo_server() as first,
        echo_server() as second,
        open_proxy(server, driver_lease, allowed=[first, second]) as (_, proxy_address),
        Tunnel(proxy_address) as tunnel,
        connect(proxy_address) as terminal,
    ):
        for channel, port in ((1, first), (2, second), (3, server)):
            tunnel.open(channel, port)
        assert tunnel.receive() == [Frame(Kind.CLOSE, 3)]
        for channel in (1, 2):
            tunnel.send(Kind.DATA, channel, b"to %d" % channel)
            assert tunnel.receive() == [Frame(Kind.DATA, channel, b"to %d" % channel)]
        assert is_echoed(terminal)


def test_a_broken_tunnel_ends_alone(driver_lease):
    """One that sends garbage, or opens a channel twice, is closed; the others go on."""
    with (
        echo_server() as port,
        open_proxy(port, driver_lease, allowed=[port]) as (_, proxy_address),
        Tunnel(proxy_address) as good,
    ):
        good.open(1, port)
        for broken in (b"\xff" * 64, encode(Frame(Kind.OPEN, 1, NUMBER.pack(port))) * 2, encode(Frame(Kind.OPEN, 1))):
            with Tunnel(proxy_address) as bad:
                bad.connection.sendall(broken)
                while not is_closed(bad.connection):
                    pass
        good.send(Kind.DATA, 1, b"still here")
        assert good.receive() == [Frame(Kind.DATA, 1, b"still here")]


def test_a_tunnel_of_a_stranger_is_closed(driver_lease):
    """Without the key none of its frames is handled: not those that it sends instead of an answer, nor after a wrong one.

    An answer that was recorded is a wrong one for the next challenge.
    """
    frames = encode(Frame(Kind.OPEN, 1, ONE_PORT)) + encode(Frame(Kind.DATA, 7)) * 1000
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        open_proxy(1, driver_lease, allowed=[server.getsockname()[1]]) as (_, proxy_address),
    ):
        port = NUMBER.pack(server.getsockname()[1])
        for answer in (frames.replace(ONE_PORT, port), handshake.answer_to(bytes(handshake.SIZE), KEY)):
            with connect(proxy_address) as connection:
                connection.sendall(PREAMBLE)
                assert connection.recv(handshake.SIZE, socket.MSG_WAITALL)
                connection.sendall(answer + frames.replace(ONE_PORT, port))
                assert is_closed(connection)
        with connect(proxy_address) as connection:
            connection.sendall(b"\0" + bytes(len(PREAMBLE) - 1))
            assert is_closed(connection)
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_stranger_costs_the_server_little(driver_lease):
    """The server gets a few kilobytes until it has sent more than it sends to strangers; then it gets all."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        open_proxy(server.getsockname()[1], driver_lease) as (_, proxy_address),
        connect(proxy_address) as terminal,
    ):
        data = b"\xff" + os.urandom(1 << 20)
        sender = threading.Thread(target=terminal.sendall, args=(data,))
        sender.start()
        served, _ = server.accept()
        with served:
            served.sendall(bytes(SERVER_PART))
            served.settimeout(1.0)
            read = bytearray()
            with contextlib.suppress(TimeoutError):
                while len(read) <= STRANGER_PART:
                    read += served.recv(1 << 16)
            assert len(read) == STRANGER_PART
            served.sendall(b"READY")
            while len(read) < len(data):
                read += served.recv(1 << 16)
            assert read == data
            assert len(terminal.recv(SERVER_PART + 5, socket.MSG_WAITALL)) == SERVER_PART + 5
        sender.join()


def test_the_limits_are_for_strangers(driver_lease):
    """Hosts and terminals of the cluster are not counted: as many strangers as before may connect from their address."""
    with (
        echo_server() as port,
        open_proxy(port, driver_lease, allowed=[port]) as (_, proxy_address),
        contextlib.ExitStack() as stack,
    ):
        tunnels = [stack.enter_context(Tunnel(proxy_address, "127.0.0.8")) for _ in range(20)]
        for tunnel in tunnels:
            tunnel.open(1, port)
            tunnel.send(Kind.DATA, 1, b"x")
            assert tunnel.receive() == [Frame(Kind.DATA, 1, b"x")]
        for _ in range(20):
            terminal = stack.enter_context(connect(proxy_address, "127.0.0.8"))
            assert is_echoed(terminal, bytes([255]) * (SERVER_PART + 1))
        for _ in range(MOST_PER_PEER):
            assert is_echoed(stack.enter_context(connect(proxy_address, "127.0.0.8")))
        assert is_closed(stack.enter_context(connect(proxy_address, "127.0.0.8")))


def test_channels_of_one_address_are_limited(driver_lease, capfd):
    """Beyond the limit the address gets no channel, over several tunnels, and another address does. Closed ones make room."""
    with (
        echo_server() as port,
        open_proxy(port, driver_lease, allowed=[port], engines=MOST_CHANNELS_PER_PEER) as (_, proxy_address),
        Tunnel(proxy_address, "127.0.0.8") as one,
        Tunnel(proxy_address, "127.0.0.8") as two,
        Tunnel(proxy_address, "127.0.0.9") as other,
    ):
        half = MOST_CHANNELS_PER_PEER // 2
        for tunnel in (one, two):
            for channel in range(half):
                tunnel.open(channel, port)
                tunnel.send(Kind.DATA, channel, b"x")
            assert {frame.kind for frame in tunnel.receive(half)} == {Kind.DATA}
        two.open(half, port)
        assert two.receive() == [Frame(Kind.CLOSE, half)]
        other.open(1, port)
        other.send(Kind.DATA, 1, b"x")
        assert other.receive() == [Frame(Kind.DATA, 1, b"x")]
        one.send(Kind.CLOSE, 0)
        one.open(half, port)  # the proxy reads it after the end of the other one
        one.send(Kind.DATA, half, b"x")
        assert one.receive() == [Frame(Kind.DATA, half, b"x")]
    assert f"127.0.0.8 was refused: {MOST_CHANNELS_PER_PEER} channels of it are open" in capfd.readouterr().err


@pytest.mark.parametrize("engines", [0, 3])
def test_channels_of_one_tunnel_to_one_port_are_limited(driver_lease, engines):
    """A host needs one for its agent, and one for each engine. Another port, and a closed channel, make room."""
    most = CHANNELS + CHANNELS_PER_ENGINE * engines
    with (
        echo_server() as port,
        echo_server() as second,
        open_proxy(port, driver_lease, allowed=[port, second], engines=engines) as (_, proxy_address),
        Tunnel(proxy_address) as tunnel,
    ):
        for channel in range(most + 1):
            tunnel.open(channel, port)
        assert tunnel.receive() == [Frame(Kind.CLOSE, most)]
        tunnel.send(Kind.CLOSE, 0)
        for channel, to in ((most + 1, second), (most + 2, port)):
            tunnel.open(channel, to)
            tunnel.send(Kind.DATA, channel, b"x")
            assert tunnel.receive() == [Frame(Kind.DATA, channel, b"x")]
    assert most_channels(engines) == most


def test_the_driver_learns_of_a_tunnel_s_end(driver_lease):
    """So a host whose processes are all killed is known at once. Agents that ended themselves, and tunnels that were replaced, are not reported."""
    folder = Path(driver_lease.file).parent
    with ended_tunnels.listen(folder) as listener, echo_server() as port:
        listener.setblocking(True)
        listener.settimeout(20)
        with open_proxy(port, driver_lease, allowed=[port]) as (_, proxy_address):

            def open_tunnel(host):
                tunnel = Tunnel(proxy_address)
                tunnel.send(Kind.NAME, 0, ended_tunnels.name_of(host, 3))
                tunnel.open(1, port)
                tunnel.send(Kind.DATA, 1, b"x")
                tunnel.receive()  # the proxy has read the name
                return tunnel

            open_tunnel("a host").connection.close()
            assert ended_tunnels.read(listener) == ("a host", 3)
            ended = open_tunnel("b")
            ended.send(Kind.EXIT, 0, NUMBER.pack(0))
            replaced, newest = open_tunnel("c"), open_tunnel("c")
            for tunnel in (ended, replaced, newest):
                tunnel.connection.close()
            assert ended_tunnels.read(listener) == ("c", 3)
        listener.setblocking(False)
        assert ended_tunnels.read(listener) is None
