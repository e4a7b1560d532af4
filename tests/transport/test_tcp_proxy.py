"""The gate: bytes pass both ways, so many of one address and no more, and it ends with whoever opened it."""

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
    """All ends with this process."""
    return until_the_end(tmp_path)


@contextlib.contextmanager
def echo():
    """A loopback port where what is sent comes back."""

    def answer(one):
        with one, contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                one.sendall(data)

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
def opened(port, driver_lease, address="127.0.0.1"):
    """A gate before this port: the gate, and the address of its door."""
    one = TcpProxy(address, driver_lease)
    try:
        yield one, (address, one.open([port])[port])
    finally:
        one.close()


def call(door, source=None):
    return socket.create_connection(door, timeout=20, source_address=(source, 0) if source else None)


def comes_back(one, data=b"there"):
    one.sendall(data)
    return one.recv(len(data)) == data


def refused(one):
    """Whether the other side has ended it."""
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_bytes_pass_both_ways(address, driver_lease):
    """Much more than any buffer holds, unchanged and in order; and the end of one side is the end of the other."""
    data = os.urandom(1 << 23)
    with echo() as port, opened(port, driver_lease, address) as (_, door), call(door) as one:
        sender = threading.Thread(target=one.sendall, args=(data,))
        sender.start()
        back = bytearray()
        while len(back) < len(data):
            back += one.recv(1 << 16)
        sender.join()
        assert back == data
        one.shutdown(socket.SHUT_WR)
        assert refused(one)


def test_so_many_of_one_address_and_no_more(driver_lease):
    """Past that the address is refused, another one is not; and who has gone makes room."""
    with echo() as port, opened(port, driver_lease) as (_, door), contextlib.ExitStack() as stack:
        ours = [stack.enter_context(call(door, "127.0.0.8")) for _ in range(MOST_PER_PEER)]
        assert all(comes_back(one) for one in ours)
        for _ in range(20):
            assert refused(stack.enter_context(call(door, "127.0.0.8")))
        assert comes_back(stack.enter_context(call(door, "127.0.0.9")))
        assert all(comes_back(one) for one in ours)
        for one in ours[:5]:
            one.close()

        def room():
            with call(door, "127.0.0.8") as one, contextlib.suppress(OSError):
                return comes_back(one)

        until(room, what="room for another one")


def test_many_workers_of_one_address(capfd, driver_lease):
    """All workers that are asked for may come from one address; the first refusal of an address is said, and no other."""
    with echo() as port, contextlib.ExitStack() as stack:
        gate = TcpProxy("127.0.0.1", driver_lease, workers=lambda: MOST_PER_PEER)
        stack.callback(gate.close)
        door = ("127.0.0.1", gate.open([port])[port])
        ours = [stack.enter_context(call(door, "127.0.0.8")) for _ in range(2 * MOST_PER_PEER)]
        assert all(comes_back(one) for one in ours)
        for _ in range(3):
            assert refused(stack.enter_context(call(door, "127.0.0.8")))
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "127.0.0.8 was refused: 256 connections of it" in said


def test_nobody_behind_it(driver_lease):
    """Where nothing listens any more, a caller is refused, and the gate goes on."""
    with echo() as port:
        with opened(port, driver_lease) as (one, door):
            with call(door) as caller:
                assert comes_back(caller)
            other = one.open([1])[1]
            with call((door[0], other)) as caller:
                assert refused(caller)
            with call(door) as caller:
                assert comes_back(caller)


def test_closing_leaves_nothing(driver_lease):
    """No process, no open door, no descriptor; closing twice is fine."""
    before = len(os.listdir("/proc/self/fd"))
    with echo() as port:
        with opened(port, driver_lease) as (one, door):
            with call(door) as caller:
                assert comes_back(caller)
            (process,) = [child for child in psutil.Process().children() if "tcp_proxy" in " ".join(child.cmdline())]
            one.close()
        assert not alive(process.pid)
        with pytest.raises(ConnectionRefusedError):
            call(door)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


OPENER = """
import sys, time
from pathlib import Path
from nbelastic.provision.tcp_proxy import TcpProxy
from tests.support.driver_lease import until_the_end
gate = TcpProxy("127.0.0.1", until_the_end(Path(sys.argv[2])))
print(gate.open([int(sys.argv[1])]).popitem()[1], list(gate._children.values())[0].pid, flush=True)
time.sleep(1000)
"""


def test_it_ends_with_the_kernel_that_owns_it(tmp_path):
    """Also where that was killed, and the driver with it."""
    with echo() as port:
        with subprocess.Popen(
            [sys.executable, "-c", OPENER, str(port), str(tmp_path)], stdout=subprocess.PIPE
        ) as opener:
            door, pid = map(int, opener.stdout.readline().split())
            with call(("127.0.0.1", door)) as one:
                assert comes_back(one)
                opener.send_signal(signal.SIGKILL)
                until(lambda: not alive(pid), what="the gate to end")
                assert refused(one)


def mended(doors, door):
    """As the driver does it now and then: a process that was killed may not quite have ended, its port be taken."""
    doors.restart_dead()
    with contextlib.suppress(ConnectionError), call(door) as one:
        return comes_back(one)


def test_one_that_is_killed_is_opened_again(driver_lease):
    """At the same ports, by whoever has it then: callers come back; what it leads to has not noticed."""
    with echo() as port:
        doors, other = ProxySet(driver_lease), ProxySet(driver_lease)
        try:
            link = doors.proxied_endpoint("127.0.0.1", f"tcp://127.0.0.1:{port}")
            door = ("127.0.0.1", int(link.rpartition(":")[2]))
            for who in (doors, other):
                if who is other:
                    other.adopt(doors.endpoints, doors.saved)
                    assert other.saved == doors.saved
                with call(door) as one:
                    assert comes_back(one)
                    (gate,) = who.saved
                    os.kill(pid_of(gate.process), signal.SIGKILL)
                    assert refused(one)
                until(lambda: mended(who, door))
            assert other.proxied_endpoint("127.0.0.1", f"tcp://127.0.0.1:{port}") == link
        finally:
            other.close()
            doors.close()


def test_one_that_ends_at_once_is_not_started_in_a_hot_loop(monkeypatch, driver_lease):
    """The first time at once; then after pauses that double up to 30 s, until one has lived for long."""
    started = []
    monkeypatch.setattr(TcpProxy, "_restart", lambda gate, process: started.append(process) or True)
    gate = TcpProxy("127.0.0.1", driver_lease)
    gate.adopt("1@1", {})  # there is no such process
    replaced = [tick / 2 for tick in range(601) if gate.restart_dead(tick / 2)]
    assert replaced[0] == 0.0
    assert len(replaced) == len(started) < 20
    assert max(later - earlier for earlier, later in pairwise(replaced)) <= 30.5
    assert gate.restart_dead(1000.0) == 1
    assert gate.restart_dead(1000.5) == 1


def test_an_address_of_somebody_else(driver_lease):
    """No gate there, and no process that waits for one."""
    before = psutil.Process().children()
    with pytest.raises(OSError, match="assign"):
        TcpProxy("198.51.100.7", driver_lease).open([1])
    assert psutil.Process().children() == before


def test_doors_for_engines(driver_lease):
    """ipyparallel's connection information names doors instead of ports; each address has doors of its own, opened once."""
    doors = ProxySet(driver_lease)
    with echo() as port:
        info = json.dumps({"registration": port, "task": [port, port], "key": "k", "interface": "tcp://127.0.0.1"})
        try:
            assert doors.proxied_connection("", info) == info
            first = json.loads(doors.proxied_connection("127.0.0.1", info))
            assert doors.proxied_connection("127.0.0.1", info) == json.dumps(first)
            assert first["interface"] == "tcp://127.0.0.1"
            assert first["key"] == "k"
            with call(("127.0.0.1", first["registration"])) as one, call(("127.0.0.1", first["task"][1])) as other:
                assert comes_back(one)
                assert comes_back(other)
            assert doors.proxied_endpoint("::1", f"tcp://127.0.0.1:{port}").startswith("tcp://[::1]:")
        finally:
            doors.close()
    assert not [child for child in psutil.Process().children() if "tcp_proxy" in " ".join(child.cmdline())]
