"""The TCP proxy forwards bytes both ways, limits connections per address, and ends with its owner."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from itertools import pairwise

import psutil
import pytest

from nbelastic.provision.tcp_proxy import ProxySet, TcpProxy
from nbelastic.provision.tcp_proxy_process import MOST_PER_PEER
from nbelastic.system.process_identity import pid_of
from tests.support.driver_lease import until_the_end
from tests.support.processes import alive
from tests.support.waiting import until


@pytest.fixture
def driver_lease(tmp_path):
    """The proxies end with this process."""
    return until_the_end(tmp_path)


@contextlib.contextmanager
def echo_server():
    """A loopback port that sends back all that it receives."""

    def answer(connection):
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def listen():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=512) as server:
        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextlib.contextmanager
def open_proxy(port, driver_lease, address="127.0.0.1"):
    """A TCP proxy for this port, and the address at which it listens."""
    proxy = TcpProxy(address, driver_lease)
    try:
        yield proxy, (address, proxy.open([port])[port])
    finally:
        proxy.close()


def connect(proxy_address, source=None):
    return socket.create_connection(proxy_address, timeout=20, source_address=(source, 0) if source else None)


def is_echoed(connection, data=b"there"):
    connection.sendall(data)
    return connection.recv(len(data)) == data


def is_closed(connection):
    """Whether the other side has closed the connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_bytes_pass_both_ways(address, driver_lease):
    """Far more bytes than any buffer holds arrive unchanged and in order. The end of one side ends the other."""
    data = os.urandom(1 << 23)
    with (
        echo_server() as port,
        open_proxy(port, driver_lease, address) as (_, proxy_address),
        connect(proxy_address) as connection,
    ):
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        back = bytearray()
        while len(back) < len(data):
            back += connection.recv(1 << 16)
        sender.join()
        assert back == data
        connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)


def test_connections_of_one_address_are_limited(driver_lease):
    """Beyond the limit the address is refused, and another one is not. Closed connections make room."""
    with (
        echo_server() as port,
        open_proxy(port, driver_lease) as (_, proxy_address),
        contextlib.ExitStack() as stack,
    ):
        connections = [stack.enter_context(connect(proxy_address, "127.0.0.8")) for _ in range(MOST_PER_PEER)]
        assert all(is_echoed(connection) for connection in connections)
        for _ in range(20):
            assert is_closed(stack.enter_context(connect(proxy_address, "127.0.0.8")))
        assert is_echoed(stack.enter_context(connect(proxy_address, "127.0.0.9")))
        assert all(is_echoed(connection) for connection in connections)
        for connection in connections[:5]:
            connection.close()

        def room():
            with connect(proxy_address, "127.0.0.8") as connection, contextlib.suppress(OSError):
                return is_echoed(connection)

        until(room, what="room for another connection")


def test_many_workers_of_one_address(capfd, driver_lease):
    """All workers that the cluster wants may connect from one address.

    Only the first refusal of an address is printed.
    """
    with echo_server() as port, contextlib.ExitStack() as stack:
        proxy = TcpProxy("127.0.0.1", driver_lease, workers=lambda: MOST_PER_PEER)
        stack.callback(proxy.close)
        proxy_address = ("127.0.0.1", proxy.open([port])[port])
        connections = [stack.enter_context(connect(proxy_address, "127.0.0.8")) for _ in range(2 * MOST_PER_PEER)]
        assert all(is_echoed(connection) for connection in connections)
        for _ in range(3):
            assert is_closed(stack.enter_context(connect(proxy_address, "127.0.0.8")))
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1
    assert "127.0.0.8 was refused: 256 connections of it" in printed


def test_a_port_without_a_listener(driver_lease):
    """A connection to a port without a listener is closed, and the proxy goes on."""
    with echo_server() as port:
        with open_proxy(port, driver_lease) as (proxy, proxy_address):
            with connect(proxy_address) as connection:
                assert is_echoed(connection)
            unused_port = proxy.open([1])[1]
            with connect((proxy_address[0], unused_port)) as connection:
                assert is_closed(connection)
            with connect(proxy_address) as connection:
                assert is_echoed(connection)


def test_closing_leaves_nothing(driver_lease):
    """No process, open port or descriptor; closing twice is fine."""
    before = len(os.listdir("/proc/self/fd"))
    with echo_server() as port:
        with open_proxy(port, driver_lease) as (proxy, proxy_address):
            with connect(proxy_address) as connection:
                assert is_echoed(connection)
            (process,) = [child for child in psutil.Process().children() if "tcp_proxy" in " ".join(child.cmdline())]
            proxy.close()
        assert not alive(process.pid)
        with pytest.raises(ConnectionRefusedError):
            connect(proxy_address)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


OPENER = """\
import sys, time
from pathlib import Path
from nbelastic.provision.tcp_proxy import TcpProxy
from tests.support.driver_lease import until_the_end
proxy = TcpProxy("127.0.0.1", until_the_end(Path(sys.argv[2])))
print(proxy.open([int(sys.argv[1])]).popitem()[1], list(proxy._children.values())[0].pid, flush=True)
time.sleep(1000)
"""


def test_it_ends_with_the_kernel_that_owns_it(tmp_path):
    """Also when the kernel is killed, and the driver with it."""
    with echo_server() as port:
        with subprocess.Popen(
            [sys.executable, "-c", OPENER, str(port), str(tmp_path)], stdout=subprocess.PIPE
        ) as opener:
            proxy_port, pid = map(int, opener.stdout.readline().split())
            with connect(("127.0.0.1", proxy_port)) as connection:
                assert is_echoed(connection)
                opener.send_signal(signal.SIGKILL)
                until(lambda: not alive(pid), what="the proxy to end")
                assert is_closed(connection)


def restart_and_connect(proxies, proxy_address):
    """Restart as the driver does regularly: a killed process may not have ended yet, and its port may be in use."""
    proxies.restart_dead()
    with contextlib.suppress(ConnectionError), connect(proxy_address) as connection:
        return is_echoed(connection)


def test_a_killed_proxy_is_restarted(driver_lease):
    """At the same ports, by this driver or a later one: peers can connect again."""
    with echo_server() as port:
        proxies, second = ProxySet(driver_lease), ProxySet(driver_lease)
        try:
            endpoint = proxies.proxied_endpoint("127.0.0.1", f"tcp://127.0.0.1:{port}")
            proxy_address = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
            for proxy_set in (proxies, second):
                if proxy_set is second:
                    second.adopt(proxies.endpoints, proxies.saved)
                    assert second.saved == proxies.saved
                with connect(proxy_address) as connection:
                    assert is_echoed(connection)
                    (proxy,) = proxy_set.saved
                    os.kill(pid_of(proxy.process), signal.SIGKILL)
                    assert is_closed(connection)
                until(lambda: restart_and_connect(proxy_set, proxy_address))
            assert second.proxied_endpoint("127.0.0.1", f"tcp://127.0.0.1:{port}") == endpoint
        finally:
            second.close()
            proxies.close()


def test_a_proxy_that_ends_at_once_is_restarted_after_pauses(monkeypatch, driver_lease):
    """The first restart comes at once, later ones after pauses that double up to 30 s."""
    restarted = []
    monkeypatch.setattr(TcpProxy, "_restart", lambda proxy, process: restarted.append(process) or True)
    proxy = TcpProxy("127.0.0.1", driver_lease)
    proxy.adopt("1@1", {})  # there is no such process
    replaced = [tick / 2 for tick in range(601) if proxy.restart_dead(tick / 2)]
    assert replaced[0] == 0.0
    assert len(replaced) == len(restarted) < 20
    assert max(later - earlier for earlier, later in pairwise(replaced)) <= 30.5
    assert proxy.restart_dead(1000.0) == 1
    assert proxy.restart_dead(1000.5) == 1


def test_an_address_of_another_machine(driver_lease):
    """There is no proxy for it, and no process."""
    before = psutil.Process().children()
    with pytest.raises(OSError, match="assign"):
        TcpProxy("198.51.100.7", driver_lease).open([1])
    assert psutil.Process().children() == before


def test_proxied_ports_for_engines(driver_lease):
    """ipyparallel's connection information has the proxy's ports; each address has its own ports, opened once."""
    proxies = ProxySet(driver_lease)
    with echo_server() as port:
        info = json.dumps({"registration": port, "task": [port, port], "key": "k", "interface": "tcp://127.0.0.1"})
        try:
            assert proxies.proxied_connection("", info) == info
            first = json.loads(proxies.proxied_connection("127.0.0.1", info))
            assert proxies.proxied_connection("127.0.0.1", info) == json.dumps(first)
            assert first["interface"] == "tcp://127.0.0.1"
            assert first["key"] == "k"
            with (
                connect(("127.0.0.1", first["registration"])) as connection,
                connect(("127.0.0.1", first["task"][1])) as second,
            ):
                assert is_echoed(connection)
                assert is_echoed(second)
            assert proxies.proxied_endpoint("::1", f"tcp://127.0.0.1:{port}").startswith("tcp://[::1]:")
        finally:
            proxies.close()
    assert not [child for child in psutil.Process().children() if "tcp_proxy" in " ".join(child.cmdline())]
