"""Probers: which hosts and addresses they reach, and which peers get no answer."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from queue import Queue

import pytest
import zmq

from nbelastic.agent import prober
from nbelastic.agent.prober import Prober, endpoint
from nbelastic.system.addresses import address_of
from nbelastic.transport.keys import Keys
from tests.support.waiting import until

KEYS = Keys.make().for_clients()


@contextmanager
def running(host="gpu1", *addresses, keys=KEYS):
    one = Prober(host, keys, addresses or ("127.0.0.1",))
    one.start()
    try:
        yield one
    finally:
        one.close()


def ask(one, target, endpoints, timeout=9.0):
    """The addresses that `one` reaches, and the seconds until it reported them."""
    answers = Queue()
    began = time.monotonic()
    one.probe(target, endpoints, timeout, answers.put)
    return answers.get(timeout=10), time.monotonic() - began


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Relay:
    """A slow network before an endpoint: each chunk takes `delay` seconds; the first `lost` connections carry no data."""

    def __init__(self, port: int, delay: float = 0.0, lost: int = 0) -> None:
        self._target, self._delay, self._lost = port, delay, lost
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(near)
            if self._lost:
                self._lost -= 1
                continue
            far = socket.create_connection(("127.0.0.1", self._target))
            self._sockets.append(far)
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._carry, args=(source, sink))
                self._threads.append(thread)
                thread.start()

    def _carry(self, source, sink):
        try:
            while data := source.recv(65536):
                time.sleep(self._delay)
                sink.sendall(data)
        except OSError:
            return

    def close(self):
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(5)


@contextmanager
def relay(*args, **kwargs):
    one = Relay(*args, **kwargs)
    try:
        yield one
    finally:
        one.close()


def test_one_host_reaches_another_at_each_address():
    """A host that listens on three addresses, at one port, is reached at all three, in the order of the probe."""
    with running("gpu1") as one, running("gpu2", "127.0.0.3", "127.0.0.4", "127.0.0.5") as other:
        assert other.addresses == ("127.0.0.3", "127.0.0.4", "127.0.0.5")
        assert len({where.rpartition(":")[2] for where in other.endpoints}) == 1
        reached, took = ask(one, "gpu2", other.endpoints[::-1], timeout=9.0)
        assert reached == ("127.0.0.5", "127.0.0.4", "127.0.0.3")
        assert took < 8.0, "when all addresses have answered, the probe ends before its timeout"


def test_an_endpoint_is_an_address_and_a_port():
    """An endpoint is an address and a port, with IPv6 in brackets, as ZeroMQ requires."""
    assert endpoint("10.0.0.1", 7) == "tcp://10.0.0.1:7"
    assert endpoint("fd00::2", 7) == "tcp://[fd00::2]:7"
    assert address_of("tcp://[fd00::2]:7") == "fd00::2"


def test_ipv6_is_reached_too():
    """IPv6 is reached on the same port as IPv4."""
    with running("gpu1", "127.0.0.1", "::1") as one:
        assert ask(one, "gpu1", one.endpoints)[0] == ("127.0.0.1", "::1")


def test_an_address_without_a_listener_is_not_reached():
    """A probe of an address without a listener ends at the timeout, with the addresses that were reached."""
    with running() as one:
        dead = [f"tcp://127.0.0.9:{free_port()}", "tcp://192.0.2.77:9"]
        reached, took = ask(one, "gpu1", [dead[0], *one.endpoints, dead[1]], timeout=3.0)
        assert reached == ("127.0.0.1",)
        assert took > 2.9


def test_another_host_at_the_address_does_not_count():
    """An address at which another host of the cluster answers is not reached."""
    with running("gpu1") as one, running("gpu3") as other:
        assert ask(one, "gpu2", other.endpoints, timeout=0.5)[0] == ()


def test_a_probe_without_endpoints_ends_at_once():
    """A probe without endpoints ends at once and reaches no address."""
    with running() as one:
        assert ask(one, "gpu2", ())[0] == ()


def test_a_host_of_another_cluster_is_not_reached():
    """A host with the keys of another cluster is not reached."""
    with running("gpu1", keys=Keys.make().for_clients()) as stranger, running("gpu2") as other:
        assert ask(stranger, "gpu2", other.endpoints, timeout=0.5)[0] == ()
        assert ask(other, "gpu1", stranger.endpoints, timeout=0.5)[0] == ()
        assert ask(other, "gpu2", other.endpoints)[0] == ("127.0.0.1",), "the prober still works"


@pytest.mark.parametrize("keys", ["none", "its own", "only the server's public one"])
def test_without_the_clients_secret_there_is_no_answer(keys):
    """The prober ignores plain text, and other key pairs even with the server's right public key."""
    with running("gpu1") as one:
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        if keys != "none":
            public, secret = zmq.curve_keypair()
            stranger.curve_publickey, stranger.curve_secretkey = public, secret
            stranger.curve_serverkey = public if keys == "its own" else KEYS.client_public.encode()
        stranger.connect(one.endpoints[0])
        stranger.send(b"who")
        assert not stranger.poll(500)
        context.destroy(linger=0)
        assert ask(one, "gpu1", one.endpoints)[0] == ("127.0.0.1",)


def test_invalid_data_is_ignored():
    """After bytes that are not ZeroMQ, other questions, and idle connections, the next question is answered."""
    with running("gpu1") as one:
        quiet = [socket.create_connection(("127.0.0.1", one.port)) for _ in range(20)]
        with socket.create_connection(("127.0.0.1", one.port)) as rude:
            rude.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4096))
        odd = one._socket(zmq.DEALER)
        odd.curve_serverkey = KEYS.client_public.encode()
        odd.connect(one.endpoints[0])
        for nonsense in ([b""], [b"who", b"else"], [b"x" * 900], [b"\xff\x00"]):
            odd.send_multipart(nonsense)
        assert not odd.poll(300)
        odd.close()
        assert ask(one, "gpu1", one.endpoints)[0] == ("127.0.0.1",)
        for connection in quiet:
            connection.settimeout(20)
            while connection.recv(100):  # its greeting, then the end: idle connections are closed
                pass
            connection.close()


def test_a_slow_network_is_reached_in_time():
    """With a round trip of 200 ms, and two connections without data, a later connection succeeds within 2.5 s."""
    with running("gpu1") as one, running("gpu2") as other, relay(other.port, delay=0.1, lost=2) as slow:
        reached, took = ask(one, "gpu2", [f"tcp://127.0.0.1:{slow.port}"], timeout=prober.TIMEOUT)
        assert reached == ("127.0.0.1",)
        assert took < prober.TIMEOUT


def test_many_probes_at_once():
    """Eight hosts that probe one another at once get all their results."""
    hosts = [Prober(f"gpu{n}", KEYS, ("127.0.0.1", f"127.0.1.{n}")) for n in range(1, 9)]
    for one in hosts:
        one.start()
    try:
        answers = Queue()
        pairs = [(one, other) for one in hosts for other in hosts]
        for one, other in pairs:
            one.probe(other._host, other.endpoints, 9.0, answers.put)
        assert all(len(answers.get(timeout=10)) == 2 for _ in pairs)
    finally:
        for one in hosts:
            one.close()


def test_many_hosts_that_do_not_answer_leave_the_prober_alive():
    """The first host of a cluster probes each host that comes. All have results, also if they come at once and none answers."""
    with running("gpu1") as one, running("gpu2") as two:
        answers, silent = Queue(), free_port()
        for n in range(1, 201):
            one.probe(f"new{n}", [f"tcp://127.0.{address}.{n}:{silent}" for address in range(3)], 3.0, answers.put)
        assert ask(one, "gpu2", two.endpoints)[0] == ("127.0.0.1",)
        assert [answers.get(timeout=60) for _ in range(200)] == [()] * 200
        assert ask(one, "gpu2", two.endpoints)[0] == ("127.0.0.1",)


def test_an_error_in_a_callback_is_logged(caplog):
    """An error in a callback is logged, and the prober continues."""
    with running() as one:
        one.probe("gpu1", one.endpoints, 1.0, lambda _: 1 / 0)
        assert ask(one, "gpu1", one.endpoints)[0] == ("127.0.0.1",)
        until(lambda: "ZeroDivisionError" in caplog.text, what="the other answer")
    assert KEYS.client_secret not in caplog.text


def test_close_leaves_nothing_open():
    """After a close during probes there is no thread, no descriptor, no port, and no late result."""
    with running():
        pass  # what Python and ZeroMQ open once per process
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    answers = Queue()
    one = Prober("gpu1", KEYS, ("127.0.0.1", "127.0.0.2"))
    one.start()
    for _ in range(5):
        one.probe("gpu2", ["tcp://192.0.2.77:9", f"tcp://127.0.0.1:{free_port()}"], 60.0, answers.put)
    time.sleep(0.1)
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 30
    assert set(threading.enumerate()) <= threads  # fewer: a thread of an earlier test has ended meanwhile
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    socket.create_server(("127.0.0.2", one.port)).close()
    assert answers.empty()
    one.close()
    one.probe("gpu2", (), 1.0, answers.put)  # by a thread that does not know of the close: no effect


def test_a_missing_address_is_left_out():
    """A prober listens on its other addresses if one was removed."""
    with running("gpu1", "192.0.2.77", "127.0.0.6") as one:
        assert one.addresses == ("127.0.0.6",)


def test_no_usable_address_is_an_error():
    """The error of a prober without a usable address names host and addresses, and nothing stays open."""
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"the prober of gpu1 can listen on none of its addresses \(192\.0\.2\.77"):
        Prober("gpu1", KEYS, ("192.0.2.77",)).start()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4


def test_a_port_that_is_taken_on_one_address_is_not_used(monkeypatch):
    """A prober tries another port if the first one is taken on one of its addresses."""
    taken = []
    bind = zmq.Socket.bind

    def crowded(self, where):
        if "127.0.0.7" in where and len(taken) < 2:
            port = int(where.rpartition(":")[2])
            taken.append(socket.create_server(("127.0.0.7", port)))
        return bind(self, where)

    monkeypatch.setattr(zmq.Socket, "bind", crowded)
    with running("gpu1", "127.0.0.1", "127.0.0.7") as one:
        assert one.addresses == ("127.0.0.1", "127.0.0.7")
        assert one.port not in [other.getsockname()[1] for other in taken]
    for other in taken:
        other.close()


def test_strangers_cannot_use_up_the_descriptors(monkeypatch):
    """An agent needs descriptors for more than its prober. With many connections this one listens no more, and then again."""
    monkeypatch.setattr(prober, "MOST_OPEN", len(os.listdir("/proc/self/fd")) + 200)
    with running("gpu1") as one, running("gpu2") as two:
        held = []

        def hold_many():
            for _ in range(1000):
                held.append(socket.create_connection(("127.0.0.1", two.port)))
                time.sleep(0.002)

        with pytest.raises(ConnectionRefusedError):
            hold_many()
        for each in held:
            each.close()
        until(lambda: ask(one, "gpu2", two.endpoints, 1.0)[0] == ("127.0.0.1",), 20, "the prober to listen again")
