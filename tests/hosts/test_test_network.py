"""The test network: its hosts, its faults and its end."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.hosts import network as networks
from tests.hosts.host_setup import without_python
from tests.hosts.namespaces import names
from tests.hosts.network import DRIVER, Network
from tests.support.processes import alive, descendants
from tests.support.waiting import until

SILENCE = 0.6  # seconds; without a fault a packet needs milliseconds
pytestmark = pytest.mark.soak  # these are tests of the test network, and not of nbelastic

PATIENCE = 30.0


def ssh(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command, nothing = ["ssh", "-o", "BatchMode=yes", *arguments], subprocess.DEVNULL
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=PATIENCE, stdin=nothing)


class Connection:
    """A TCP connection from host a to host b; this process has both ends."""

    def __init__(self, network: Network, a: str, b: str, to: str = "", timeout: float = PATIENCE) -> None:
        to = to or network[b].address
        family = socket.AF_INET6 if ":" in to else socket.AF_INET
        with network.socket(b, family) as listening, contextlib.ExitStack() as undo:
            self.near = undo.enter_context(network.socket(a, family))
            self.near.settimeout(timeout)
            listening.bind((to, 0))
            listening.listen()
            self.near.connect(listening.getsockname())
            self.far, _ = listening.accept()
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.near.close()
        self.far.close()

    def there(self, timeout: float = PATIENCE) -> bool:
        """Whether a byte from the near end arrives at the far end in time."""
        return self._passes(self.near, self.far, timeout)

    def back(self, timeout: float = PATIENCE) -> bool:
        return self._passes(self.far, self.near, timeout)

    def arrives(self, at: socket.socket, count: int = 1) -> bytes:
        """Wait for `count` bytes that were sent before."""
        at.settimeout(PATIENCE)
        data = b""
        while len(data) < count:
            more = at.recv(count - len(data))
            assert more, "the connection was closed"
            data += more
        return data

    @staticmethod
    def _passes(sender: socket.socket, receiver: socket.socket, timeout: float) -> bool:
        sender.sendall(b".")
        receiver.settimeout(timeout)
        try:
            return receiver.recv(1) == b"."
        except TimeoutError:  # the packets vanished; a reset raises ConnectionError, which ends the test
            return False


def test_a_command_runs_on_each_host_by_its_name_and_by_ipv6(network: Network) -> None:
    """`ssh h1` runs without a question on a host with that name, with the addresses of the host and the driver."""
    for name in ("h1", "h2", "h3"):
        host = network[name]
        for alias, here, there in (
            (name, network[DRIVER].address, host.address),
            (f"{name}v6", network[DRIVER].address6, host.address6),
        ):
            said = ssh(alias, "hostname; echo $SSH_CONNECTION").stdout.split()
            assert said[0] == name
            assert (said[1], said[3]) == (here, there)


def test_hosts_reach_each_other_and_the_driver(network: Network) -> None:
    """Hosts and the driver reach each other over IPv4 and IPv6."""
    for a, b in (("h1", "h2"), ("h3", "h2"), (DRIVER, "h3"), ("h1", DRIVER)):
        for to in (network[b].address, network[b].address6):
            with Connection(network, a, b, to) as connection:
                assert connection.there()
                assert connection.back()


def test_the_hosts_are_not_children_of_this_process(network: Network) -> None:
    """A test that counts the descendants of a cluster does not count processes of the network."""
    network.slow("h1")
    assert network.processes("h1")
    assert not descendants()


def test_a_cut_is_silent_and_a_healed_connection_goes_on(network: Network) -> None:
    """A cut gives no error in either direction, and bytes sent meanwhile arrive later. Other hosts are not affected."""
    with (
        Connection(network, DRIVER, "h1") as cut,
        Connection(network, "h1", "h2") as also,
        Connection(network, "h2", "h3") as other,
    ):
        assert all(c.there() and c.back() for c in (cut, also, other))
        network.cut("h1")
        for connection in (cut, also):
            assert not connection.there(SILENCE)
            assert not connection.back(SILENCE)
        assert other.there()
        assert other.back()
        with pytest.raises(TimeoutError):
            Connection(network, DRIVER, "h1", timeout=SILENCE)
        network.heal("h1")
        for connection in (cut, also):
            assert connection.arrives(connection.near) == connection.arrives(connection.far) == b"."
            assert connection.there()


def test_the_driver_can_be_cut_off_too(network: Network) -> None:
    """A cut of the driver separates it from the hosts, which still reach each other."""
    with Connection(network, DRIVER, "h1") as cut, Connection(network, "h1", "h2") as other:
        assert cut.there()
        network.cut(DRIVER)
        assert not cut.there(SILENCE)
        assert other.there()
        network.heal()
        assert cut.arrives(cut.far) == b"."


@pytest.mark.parametrize("version", [4, 6])
def test_a_cut_between_two_concerns_only_these_two(network: Network, version: int) -> None:
    """h1 and h2 do not reach each other; all other hosts reach both."""
    to = {name: host.address if version == 4 else host.address6 for name, host in network.hosts.items()}
    others = [Connection(network, a, b, to[b]) for a, b in ((DRIVER, "h1"), (DRIVER, "h2"), ("h1", "h3"), ("h3", "h2"))]
    with Connection(network, "h1", "h2", to["h2"]) as cut:
        assert cut.there()
        network.cut_between("h1", "h2")
        assert not cut.there(SILENCE)
        assert not cut.back(SILENCE)
        for other in others:
            with other:
                assert other.there()
                assert other.back()
        network.heal("h2")
        assert cut.arrives(cut.near) == cut.arrives(cut.far) == b"."


def test_a_cut_can_be_one_way(network: Network) -> None:
    """With a one-way cut, bytes from h1 to h2 are lost, and bytes from h2 to h1 arrive."""
    with Connection(network, "h1", "h2") as connection:
        assert connection.there()
        network.cut_between("h1", "h2", one_way=True)
        assert connection.back()
        assert not connection.there(SILENCE)
        network.heal()
        assert connection.arrives(connection.far) == b"."


def round_trip(connection: Connection) -> float:
    begin = time.monotonic()
    assert connection.there()
    assert connection.back()
    return time.monotonic() - begin


def test_a_slow_host_answers_late(network: Network) -> None:
    """An answer needs the delay, also on an open connection; after `heal` it does not."""
    with Connection(network, DRIVER, "h1") as slowed, Connection(network, DRIVER, "h2") as other:
        assert min(round_trip(slowed) for _ in range(10)) < 0.2
        network.slow("h1", delay=0.2)
        assert 0.2 <= min(round_trip(slowed) for _ in range(5)) < 2.0
        assert min(round_trip(other) for _ in range(10)) < 0.2
        network.slow("h1", delay=0.02)
        assert 0.02 <= min(round_trip(slowed) for _ in range(10)) < 0.2
        network.cut("h1")
        assert not slowed.there(SILENCE)
        network.heal("h1")
        assert slowed.arrives(slowed.far) == b"."
        assert min(round_trip(slowed) for _ in range(10)) < 0.2


def test_a_lossy_network_loses_some_and_tcp_still_delivers_all(network: Network) -> None:
    """A lossy host loses some datagrams, and TCP still delivers all bytes."""
    network.slow("h1", delay=0.01, loss=0.2)
    with (
        network.socket("h1", kind=socket.SOCK_DGRAM) as receiver,
        network.socket(DRIVER, kind=socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind((network["h1"].address, 0))
        for _ in range(100):
            sender.sendto(b".", receiver.getsockname())
        receiver.settimeout(2.0)
        arrived = 0
        with contextlib.suppress(TimeoutError):
            while receiver.recv(10):
                arrived += 1
        assert 20 < arrived < 100
    network.slow("h1", delay=0.01, loss=0.02)
    data = os.urandom(500_000)
    with Connection(network, DRIVER, "h1") as connection:
        connection.near.settimeout(PATIENCE)
        connection.far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, len(data))
        connection.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(data) * 2)
        connection.near.sendall(data)
        assert connection.arrives(connection.far, len(data)) == data


def test_a_kill_ends_all_processes_and_ssh_notices(network: Network) -> None:
    """`kill` ends all processes of one host, also those in another session; after a reboot ssh works again."""
    client = subprocess.Popen(["ssh", "h1", "setsid sleep 1000 & echo started; sleep 1000"], stdout=subprocess.PIPE)
    with client:
        assert client.stdout.readline() == b"started\n"
        before = network.processes("h1")
        assert len(before) >= 3
        others = network.processes("h2")
        network.kill("h1")
        assert network.processes("h1") == set()
        assert not [pid for pid in before if alive(pid)]
        assert client.wait(PATIENCE) == 255
    assert "refused" in ssh("h1", "true", check=False).stderr
    assert network.processes("h2") == others
    network.reboot("h1")
    assert ssh("h1", "hostname").stdout == "h1\n"


def test_a_power_failure_gives_no_error(network: Network) -> None:
    """After `power_off` the ssh client waits on, though the processes have ended; after a reboot ssh works again."""
    with subprocess.Popen(["ssh", "h1", "echo started; sleep 1000"], stdout=subprocess.PIPE) as client:
        assert client.stdout.readline() == b"started\n"
        network.power_off("h1")
        assert network.processes("h1") == set()
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(SILENCE)
        network.reboot("h1")
        assert ssh("h1", "hostname").stdout == "h1\n"
        client.kill()


def test_a_host_that_wants_a_password(network: Network) -> None:
    """A host with `password_only` refuses the client's key."""
    network.add("secretive", password_only=True)
    done = ssh("secretive", "true", check=False)
    assert done.returncode == 255
    assert "Permission denied (password)" in done.stderr


def test_a_host_without_python(network: Network) -> None:
    """A host without Python has the usual programs, but no python3 on PATH, nor this process's Python."""
    network.add("bare", python=False)
    question = f"hostname; command -v python3 python || echo none; {sys.executable} -V || echo $?; ls / | grep tmp"
    done = ssh("bare", question)
    hidden = ["127"] if without_python() else done.stdout.split()[2:3]
    assert done.stdout.split() == ["bare", "none", *hidden, "tmp"]


def test_a_host_where_nothing_listens(network: Network) -> None:
    """A host without sshd refuses connections; when it is cut off too, they time out."""
    network.add("closed", sshd=False)
    assert "Connection refused" in ssh("closed", "true", check=False).stderr
    network.cut("closed")
    assert "timed out" in ssh("-o", "ConnectTimeout=1", "closed", "true", check=False).stderr


@pytest.mark.parametrize("dead", ["alone", "shared", "docker"])
def test_a_dead_interface_is_up_and_reaches_no_host(network: Network, dead: str) -> None:
    """A dead interface is up and has an address, but does not reach another host's dead interface in any subnet."""
    network.add("h4", "h5", dead=dead)
    listed = network.run("h4", "ip", "-4", "-br", "address").stdout.splitlines()
    assert [line.split()[0].split("@")[0] for line in listed] == ["lo", "dead0", "eth0"]
    assert listed[1].split()[1:] == ["UP", network["h4"].dead_address()]
    there = network["h5"].dead_address().split("/")[0]
    if dead == "docker":
        assert network["h4"].dead_address() == network["h5"].dead_address()
    else:
        with pytest.raises(OSError) as caught:
            Connection(network, "h4", "h5", there, timeout=SILENCE)
        assert caught.value.errno in {None, errno.EHOSTUNREACH, errno.ENETUNREACH}
    with Connection(network, "h4", "h5") as connection:
        assert connection.there()


def test_a_second_interface_works_until_the_host_is_cut_off(network: Network) -> None:
    """A second interface connects two hosts; `cut` and `slow` affect it too."""
    network.add("h4", "h5", second=True)
    with Connection(network, "h4", "h5", network["h5"].second_address) as connection:
        assert connection.there()
        network.cut("h5")
        assert not connection.there(SILENCE)
        network.heal("h5")
        assert connection.arrives(connection.far) == b"."
        network.slow("h5", delay=0.2)
        assert min(round_trip(connection) for _ in range(3)) >= 0.2


def test_a_hidden_folder_is_empty_and_the_hosts_own(network: Network, tmp_path: Path) -> None:
    """A hidden folder is empty on its host, and its files are seen on no other host."""
    (tmp_path / "here").touch()
    network.add("h4", "h5", hides=(str(tmp_path),))
    assert ssh("h1", f"ls {tmp_path}").stdout == "here\n"
    assert ssh("h4", f"touch {tmp_path}/there; ls {tmp_path}").stdout == "there\n"
    assert ssh("h4", f"ls {tmp_path}").stdout == "there\n"
    assert ssh("h5", f"ls {tmp_path}").stdout == ""


def remains(name: str, pids: set[int] = frozenset()) -> Iterator[str]:
    """The namespaces, links, processes and folders of a network that still exist."""
    yield from names(f"{name}*")
    yield from (link for link in os.listdir("/sys/class/net") if link == name)
    yield from (f"process {pid}" for pid in pids if alive(pid))
    yield from (str(path) for path in Path(tempfile.gettempdir()).glob(f"{name}-*"))


def test_nothing_is_left_even_after_a_failure(network: Network) -> None:
    """When a block with a second network raises, its processes, links and files are removed; the first network stays."""
    with contextlib.suppress(ZeroDivisionError), Network(2) as second:
        second.slow("h1")
        second.cut("h2")
        second.run("h2", "sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &")
        pids = {pid for name in ("h1", "h2") for pid in second.processes(name)} | {second._slow["h1"][0]}
        assert len(pids) == 4
        assert len(list(remains(second.name, pids))) == 4 + 4 + 1
        raise ZeroDivisionError
    assert list(remains(second.name, pids)) == []
    assert ssh("h1", "hostname").stdout == "h1\n"


def test_nothing_is_left_of_a_start_that_fails(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the start of a network fails, nothing of it is left."""
    second = Network(2)
    monkeypatch.setattr(second, "_start_ssh_servers", lambda hosts: 1 / 0)
    with pytest.raises(ZeroDivisionError), second:
        pass
    assert list(remains(second.name)) == []


def test_the_next_start_removes_what_a_killed_run_has_left(network: Network) -> None:
    """The next network removes the namespaces, processes and files of a killed test run."""
    killed = "import os, tests.hosts.network as n; a = n.Network(1).__enter__(); print(a.name, *a.processes('h1'), flush=True); os.kill(os.getpid(), 9)"
    said = subprocess.run(
        [sys.executable, "-c", killed], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    name, *pids = said.stdout.split()
    assert list(remains(name, set(map(int, pids))))
    with Network(1):
        until(lambda: not list(remains(name, set(map(int, pids)))), what="the old network to be removed")


def test_each_test_finds_the_network_as_new(network: Network) -> None:
    """`restore` undoes faults and added hosts; it builds a new network if a host's addresses or sshd have changed."""
    name = network.name
    network.add("h4", dead="alone", second=True)
    network.slow("h4")
    network.cut("h1")
    network.cut_between("h2", "h3")
    network.run("h2", "sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &")
    network.restore()
    assert network.name == name
    assert not [pid for host in ("h1", "h2", "h3") for pid in network.strays(host)]
    assert list(network.hosts) == [DRIVER, "h1", "h2", "h3"]
    assert list(names(f"{name}-h4")) == []
    network.add("h4", dead="alone", second=True)
    for a, b in (("h1", "h2"), ("h2", "h3"), ("h4", "h3")):
        with Connection(network, a, b) as connection:
            assert connection.there()
    assert ssh("h4", "hostname").stdout == "h4\n"
    for change in (
        lambda: network.kill("h1"),
        lambda: network.run("h1", "ip", "-4", "address", "flush", "dev", "eth0"),
    ):
        change()
        network.restore()
        assert list(remains(name)) == []
        name = network.name
        with Connection(network, DRIVER, "h1") as connection:
            assert connection.there()


def test_without_root_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root, `missing` names that reason."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert networks.missing.__wrapped__() == f"{networks.NEEDS}: not root"
