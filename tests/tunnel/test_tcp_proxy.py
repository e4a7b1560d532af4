"""The TCP proxy forwards terminals' connections, limits them per address, and ends with its owner."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from nbelastic.provision.tcp_proxy import ProxySet, SavedProxy, TcpProxy
from nbelastic.system.process_identity import pid_of
from nbelastic.tunnel import ended_tunnels
from nbelastic.tunnel.tcp_proxy_process import MOST_PER_PEER
from tests.support.processes import alive
from tests.support.waiting import until
from tests.tunnel.echo_server import echo_server
from tests.tunnel.proxies import connect, is_closed, is_echoed, open_proxy


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_bytes_pass_both_ways(address, driver_lease):
    """Far more bytes than any buffer holds arrive unchanged and in order. The end of one side ends the other."""
    data = b"\xff" + os.urandom(1 << 23)  # as ZeroMQ's do; 0 begins a tunnel
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


def test_a_full_disk_does_not_close_the_proxy(driver_lease):
    """It cannot write into the driver's log that it refuses a connection. Others get theirs."""
    with echo_server() as port, contextlib.ExitStack() as stack:
        errors, full = os.dup(2), os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 2)
        try:
            _, proxy_address = stack.enter_context(open_proxy(port, driver_lease))
        finally:
            os.dup2(errors, 2)
            os.close(errors)
            os.close(full)
        for _ in range(MOST_PER_PEER):
            stack.enter_context(connect(proxy_address, "127.0.0.8"))
        assert is_closed(stack.enter_context(connect(proxy_address, "127.0.0.8")))
        assert is_echoed(stack.enter_context(connect(proxy_address, "127.0.0.9")))


def test_many_workers_of_one_address(capfd, driver_lease):
    """All workers that the cluster wants may connect from one address.

    Only the first refusal of an address is printed.
    """
    with (
        echo_server() as port,
        open_proxy(port, driver_lease, workers=lambda: MOST_PER_PEER) as (_, proxy_address),
        contextlib.ExitStack() as stack,
    ):
        connections = [stack.enter_context(connect(proxy_address, "127.0.0.8")) for _ in range(2 * MOST_PER_PEER)]
        assert all(is_echoed(connection) for connection in connections)
        for _ in range(3):
            assert is_closed(stack.enter_context(connect(proxy_address, "127.0.0.8")))
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1
    assert "127.0.0.8 was refused: 256 connections of it" in printed


def test_a_server_that_does_not_listen(driver_lease):
    """A connection is closed while the server does not listen, and the proxy goes on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with open_proxy(port, driver_lease) as (_, proxy_address):
        for _ in range(2):
            with connect(proxy_address) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(b"there")
                assert is_closed(connection)


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
folder = Path(sys.argv[2])
proxy = TcpProxy("127.0.0.1", int(sys.argv[1]), folder / "ports", until_the_end(folder))
proxy.start()
print(proxy.port, proxy._child.pid, flush=True)
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


OPENER_OF_A_KEPT_CLUSTER = """\
import sys, time
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.provision.tcp_proxy import TcpProxy
from nbelastic.system.driver_lease import DriverLease
folder = RunFolder("kept")
folder.acquire()
folder.write_number("7")
folder.make()
proxy = TcpProxy("127.0.0.1", 1, folder.path / "ports", DriverLease(str(folder.lock), 0.5, "", "7"))
proxy.start()
print(proxy._child.pid, folder.path, flush=True)
time.sleep(1000)
"""


def test_the_last_process_of_a_kept_cluster_removes_its_files(tmp_path):
    """All hosts are other machines, the driver is dead and no other has come within the lease."""
    with subprocess.Popen(
        [sys.executable, "-c", OPENER_OF_A_KEPT_CLUSTER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as opener:
        pid, folder = opener.stdout.readline().split()
        assert {*os.listdir(Path(folder).parent)} == {"kept", "kept.lock"}
        opener.send_signal(signal.SIGKILL)
    until(lambda: not alive(int(pid)), what="the proxy to end")
    assert os.listdir(Path(folder).parent) == []


def restart_and_connect(proxies, proxy_address):
    """Restart as the driver does regularly: a killed process may not have ended yet, and its port may be in use."""
    proxies.restart_dead()
    with contextlib.suppress(ConnectionError), connect(proxy_address) as connection:
        return is_echoed(connection)


def test_a_killed_proxy_is_restarted(driver_lease):
    """At the same ports, by this driver or a later one: peers can connect again."""
    with echo_server() as port:
        ports = Path(driver_lease.file).with_name("ports")
        proxies, second = ProxySet(ports, driver_lease), ProxySet(ports, driver_lease)
        try:
            proxy_address = ("127.0.0.1", proxies.port("127.0.0.1", f"tcp://127.0.0.1:{port}"))
            for proxy_set in (proxies, second):
                if proxy_set is second:
                    second.adopt(proxies.saved)
                    assert second.saved == proxies.saved
                with connect(proxy_address) as connection:
                    assert is_echoed(connection)
                    (proxy,) = proxy_set.saved
                    os.kill(pid_of(proxy.process), signal.SIGKILL)
                    assert is_closed(connection)
                until(lambda: restart_and_connect(proxy_set, proxy_address))
            assert second.port("127.0.0.1", f"tcp://127.0.0.1:{port}") == proxy_address[1]
        finally:
            second.close()
            proxies.close()


def test_a_proxy_starts_although_the_ends_of_tunnels_cannot_be_reported(monkeypatch, driver_lease):
    """A full disk does not fail the start of a host. As soon as there is room, the ends of tunnels are reported."""

    def fails(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def story():
        ports = Path(driver_lease.file).with_name("ports")
        ended = asyncio.get_running_loop().create_future()
        proxies = ProxySet(ports, driver_lease, on_tunnel_end=lambda *which: ended.set_result(which))
        try:
            with monkeypatch.context() as patch:
                patch.setattr(ended_tunnels, "listen", fails)
                assert proxies.port("127.0.0.1", "tcp://127.0.0.1:1")
                proxies.restart_dead()
            proxies.restart_dead()
            ended_tunnels.report(ports.parent, ended_tunnels.name_of("h", 3))
            assert await asyncio.wait_for(ended, 10) == ("h", 3)
        finally:
            proxies.close()

    asyncio.run(story())


def test_a_proxy_that_ends_at_once_is_restarted_after_pauses(monkeypatch, driver_lease):
    """The first restart comes at once, later ones after pauses that double up to 30 s."""
    restarted = []
    monkeypatch.setattr(TcpProxy, "start", lambda _: restarted.append(1))
    saved = SavedProxy("1@1", "127.0.0.1", 1, 1)  # there is no such process
    proxy = TcpProxy.adopted(saved, Path("ports"), driver_lease)
    replaced = [tick / 2 for tick in range(601) if proxy.restart_if_dead(tick / 2)]
    assert replaced[0] == 0.0
    assert len(replaced) == len(restarted) < 20
    assert max(later - earlier for earlier, later in pairwise(replaced)) <= 30.5
    assert proxy.restart_if_dead(1000.0)
    assert proxy.restart_if_dead(1000.5)


def test_an_address_of_another_machine(driver_lease):
    """There is no proxy for it, and no process."""
    before = psutil.Process().children()
    with pytest.raises(OSError, match="assign"):
        TcpProxy("198.51.100.7", 1, Path("ports"), driver_lease).start()
    assert psutil.Process().children() == before
