"""Both ends of a tunnel, in one thread: connections that share an ssh connection, here two socket pairs."""

import contextlib
import os
import socket
import time

import pytest

from nbelastic.tunnel.forwarder import MAX_CHANNELS, Forwarder
from nbelastic.tunnel.frames import NUMBER, PREAMBLE, WINDOW, Frame, Kind, encode
from nbelastic.tunnel.strangers import SERVER_PART, STRANGER_PART
from tests.support.waiting import until

PORT = 4711


class Ends:
    """A host's end and the driver's end. `served`: the sockets that the driver's end has connected, as a server has them."""

    def __init__(self):
        self.served, self.clients, self.lost = [], [], []
        self.host = Forwarder(lambda _: None, lambda reason, closed: self.lost.append(("host", reason, closed)))
        self.driver = Forwarder(
            lambda _: None,
            lambda reason, closed: self.lost.append(("driver", reason, closed)),
            self._connect,
            preamble=True,
        )
        up, down = socket.socketpair(), socket.socketpair()
        self.driver.attach(up[0].detach(), down[0].detach())
        self.host.attach(down[1].detach(), up[1].detach(), PREAMBLE)

    def _connect(self, port, channels):
        if port != PORT:
            return None
        mine, theirs = socket.socketpair()
        self.served.append(theirs)
        return mine

    def turn(self):
        for end in (self.host, self.driver):
            end.turn(0)

    def until(self, is_true, what):
        end = time.monotonic() + 20
        while not is_true():
            assert time.monotonic() < end, f"not within 20 s: {what}"
            self.turn()

    def connect(self, port=PORT):
        """A connection of a process on the host."""
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        self.clients.append(mine)
        self.host.open(theirs, port)
        return mine

    def close(self):
        self.host.detach()
        self.driver.detach()
        for each in (*self.served, *self.clients):
            each.close()


@pytest.fixture
def ends():
    both = Ends()
    yield both
    both.close()


def received(ends, connection, size):
    """Read so many bytes, while both ends work."""
    data = bytearray()

    def read():
        with contextlib.suppress(BlockingIOError):
            data.extend(connection.recv(1 << 20))
        return len(data) >= size

    ends.until(read, f"{size} bytes; {len(data)} have come")
    return bytes(data)


def send_all(ends, connection, data):
    connection.setblocking(False)
    left = memoryview(data)

    def write():
        nonlocal left
        with contextlib.suppress(BlockingIOError):
            left = left[connection.send(left) :]
        return not left

    ends.until(write, "all to be sent")


def test_bytes_arrive_in_both_directions(ends):
    """What a process of the host sends arrives at the driver's machine, and the answer comes back; so does the end."""
    client = ends.connect()
    client.send(b"hello")
    ends.until(lambda: ends.served, "the connection")
    (server,) = ends.served
    server.setblocking(False)
    assert received(ends, server, 5) == b"hello"
    server.send(b"welcome")
    assert received(ends, client, 7) == b"welcome"
    client.close()
    ends.until(lambda: peek_end(server), "the end to arrive")


def accept(ends, client, server):
    """Let the server accept the client, as ZeroMQ's does after its handshake."""
    server.send(bytes(SERVER_PART + 1))
    received(ends, client, SERVER_PART + 1)


def peek_end(connection):
    with contextlib.suppress(BlockingIOError):
        return connection.recv(1) == b""
    return False


def test_a_connection_that_nobody_reads_delays_no_other(ends):
    """Much more than a window waits at a process that does not read; another connection passes, and nothing piles up."""
    slow, fast = ends.connect(), ends.connect()
    ends.until(lambda: len(ends.served) == 2, "both connections")
    stuck, quick = ends.served
    stuck.setblocking(False)
    sent = 0
    for _ in range(2000):
        with contextlib.suppress(BlockingIOError):
            sent += stuck.send(b"z" * 65536)
        ends.turn()
    assert sent < 8 * WINDOW  # of 131 MB
    quick.send(b"now")
    assert received(ends, fast, 3) == b"now"
    assert received(ends, slow, sent) == b"z" * sent


def test_megabytes_in_both_directions_at_once(ends):
    """16 MB each way over one channel arrive unchanged."""
    client = ends.connect()
    ends.until(lambda: ends.served, "the connection")
    (server,) = ends.served
    accept(ends, client, server)
    data = os.urandom(1 << 24)
    there, back = bytearray(), bytearray()
    left = {client: memoryview(data), server: memoryview(data)}
    for connection in left:
        connection.setblocking(False)

    def work():
        for connection, into in ((client, back), (server, there)):
            with contextlib.suppress(BlockingIOError):
                left[connection] = left[connection][connection.send(left[connection]) :]
            with contextlib.suppress(BlockingIOError):
                into.extend(connection.recv(1 << 20))
        return len(there) == len(back) == len(data)

    ends.until(work, "all to arrive")
    assert there == data
    assert back == data


def test_a_stranger_costs_the_server_a_few_kilobytes(ends):
    """A channel whose peer sends more before the server accepts it ends. Other channels, and one that was accepted, go on."""
    stranger, peer = ends.connect(), ends.connect()
    ends.until(lambda: len(ends.served) == 2, "both connections")
    server, other = ends.served
    for each in ends.served:
        each.setblocking(False)
    send_all(ends, stranger, bytes(STRANGER_PART))
    assert received(ends, server, STRANGER_PART) == bytes(STRANGER_PART)
    server.send(bytes(SERVER_PART))
    assert received(ends, stranger, SERVER_PART) == bytes(SERVER_PART)
    stranger.send(b"x")
    ends.until(lambda: peek_end(stranger), "the channel to end")
    assert peek_end(server)
    accept(ends, peer, other)
    send_all(ends, peer, bytes(STRANGER_PART + 1))
    assert received(ends, other, STRANGER_PART + 1) == bytes(STRANGER_PART + 1)
    assert not ends.lost


def test_other_ports_of_the_driver_s_machine_stay_closed(ends):
    """A host is connected to the ports that are allowed and to no other; a refused connection ends at once."""
    client = ends.connect(PORT + 1)
    ends.until(lambda: peek_end(client), "the connection to end")
    assert not ends.served
    assert not ends.lost


def test_connections_end_with_the_ssh_connection_and_work_with_the_next(ends):
    """Connections end when ssh does. In the next ssh connection new ones work."""
    client = ends.connect()
    ends.until(lambda: ends.served, "the connection")
    ends.driver.detach()
    ends.until(lambda: peek_end(client), "the connection to end")
    assert ends.lost == [("host", "", False)]
    assert peek_end(ends.connect())  # there is no ssh connection
    up, down = socket.socketpair(), socket.socketpair()
    ends.driver.attach(up[0].detach(), down[0].detach())
    ends.host.attach(down[1].detach(), up[1].detach(), PREAMBLE)
    again = ends.connect()
    again.send(b"again")
    ends.until(lambda: len(ends.served) == 2, "the connection")
    ends.served[1].setblocking(False)
    assert received(ends, ends.served[1], 5) == b"again"


def test_the_host_sees_that_only_its_input_was_closed():
    """If the driver's machine closes the input and ssh runs on, the host's end sees that: its agent has to end."""
    lost = []
    host = Forwarder(lambda _: None, lambda reason, closed: lost.append((reason, closed)))
    up, down = socket.socketpair(), socket.socketpair()
    host.attach(down[1].detach(), up[1].detach(), PREAMBLE)
    down[0].close()
    until(lambda: host.turn(0.1) or lost, 10, "the end")
    assert lost == [("", True)]
    up[0].close()


def attack(*frames):
    """What the driver's end makes of a hostile host that sends these frames: the reasons for which it ended.

    The servers accept each connection at once.
    """
    lost, connected = [], []

    def connect(port, channels):
        mine, theirs = socket.socketpair()
        connected.append(theirs)
        theirs.send(bytes(SERVER_PART + 1))
        return mine

    driver = Forwarder(lambda _: None, lambda reason, _: lost.append(reason), connect, preamble=True)
    up, down = socket.socketpair(), socket.socketpair()
    driver.attach(up[0].detach(), down[0].detach())
    up[1].setblocking(False)
    for data in (PREAMBLE, *map(encode, frames)):
        if not lost:
            assert up[1].send(data) == len(data)
            driver.turn(0)
            driver.turn(0)  # it reads what a server has sent
    driver.detach()
    for each in (*connected, up[1], down[1]):
        each.close()
    return lost, len(connected)


OPEN = Frame(Kind.OPEN, 1, NUMBER.pack(PORT))


@pytest.mark.parametrize(
    "frames",
    [
        [OPEN, OPEN],
        [Frame(Kind.OPEN, 1, b"")],
        [OPEN, Frame(Kind.CREDIT, 1, b"12345")],
        [OPEN, *[Frame(Kind.DATA, 1, b"x" * 65536)] * 200],
    ],
    ids=["a channel twice", "no port", "no number", "more than the window"],
)
def test_a_hostile_host_ends_only_its_own_tunnel(frames):
    """Frames that break the rules end that host's tunnel with a reason."""
    lost, _ = attack(*frames)
    assert len(lost) == 1
    assert lost[0]


def test_a_hostile_host_cannot_use_up_the_descriptors():
    """A host that opens channels without end gets so many; the tunnel goes on."""
    lost, connected = attack(*(Frame(Kind.OPEN, n, NUMBER.pack(PORT)) for n in range(1, MAX_CHANNELS + 100)))
    assert not lost
    assert connected <= MAX_CHANNELS


def test_data_for_an_unknown_channel_is_dropped():
    """A frame of a channel that this end has just closed changes nothing."""
    assert attack(Frame(Kind.DATA, 5, b"late"), Frame(Kind.CREDIT, 5, NUMBER.pack(1)), Frame(Kind.CLOSE, 5)) == ([], 0)
