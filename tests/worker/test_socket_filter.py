"""Who may connect to a listener: the addresses that were named, and nobody else."""

import contextlib
import os
import socket

import pytest

from nbelastic.worker.socket_filter import admit_all, admit_only
from nbelastic.worker.sockets import listeners, peers


@contextlib.contextmanager
def listening(address="127.0.0.1"):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
        one.bind((address, 0))
        one.listen(16)
        yield one


def comes_in(listener, source):
    """Whether a connection from `source` comes about."""
    with socket.socket(listener.family) as caller:
        caller.settimeout(0.3)
        caller.bind((source, 0))
        try:
            caller.connect(listener.getsockname()[:2])
        except TimeoutError:
            return False
        return True


def test_only_the_named_addresses_come_in():
    """One, several or none; the newest word counts; and the door can be opened to all again."""
    with listening() as one:
        assert comes_in(one, "127.0.0.7")
        admit_only(one.fileno(), {"127.0.0.5"})
        assert comes_in(one, "127.0.0.5")
        assert not comes_in(one, "127.0.0.6")
        admit_only(one.fileno(), {f"127.0.0.{n}" for n in range(6, 200)})
        assert [n for n in (5, 6, 7, 150, 199, 200) if comes_in(one, f"127.0.0.{n}")] == [6, 7, 150, 199]
        admit_only(one.fileno(), ())
        assert not comes_in(one, "127.0.0.6")
        admit_all(one.fileno())
        admit_all(one.fileno())
        assert comes_in(one, "127.0.0.200")


def test_ipv6_addresses():
    """All four words of an address are compared; those of the other family say nothing."""
    with listening("::1") as one:
        admit_only(one.fileno(), ("127.0.0.1", "::2", "1::1", "0:0:1::1"))
        assert not comes_in(one, "::1")
        admit_only(one.fileno(), ("::2", "::1", "fd00::1"))
        assert comes_in(one, "::1")


def test_connections_that_stand_are_not_concerned():
    """What was connected before goes on, both ways."""
    with listening() as one, socket.create_connection(one.getsockname()) as caller:
        accepted, _ = one.accept()
        with accepted:
            admit_only(one.fileno(), ())
            caller.sendall(b"there")
            assert accepted.recv(10) == b"there"
            accepted.sendall(b"and back")
            assert caller.recv(10) == b"and back"
            assert peers([one.fileno(), caller.fileno(), accepted.fileno()]) == {"127.0.0.1"}
            assert [*listeners([one.fileno(), caller.fileno(), accepted.fileno()])] == [one.fileno()]


def test_more_addresses_than_the_kernel_takes():
    """Then everybody comes in: no filter is better than one that keeps members out."""
    with listening() as one:
        admit_only(one.fileno(), {f"10.{a}.{b}.1" for a in range(20) for b in range(100)})
        assert comes_in(one, "127.0.0.7")


@pytest.mark.parametrize("kind", ["a file", "closed", "between processes"])
def test_what_is_no_network_socket_is_left_alone(kind, tmp_path):
    """No error, and no descriptor is lost."""
    near, far = socket.socketpair()
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)
    fd = {"a file": file, "closed": 9999, "between processes": near.fileno()}[kind]
    before = len(os.listdir("/proc/self/fd"))
    admit_only(fd, ())
    admit_all(fd)
    assert listeners([fd]) == {}
    assert peers([fd]) == set()
    assert len(os.listdir("/proc/self/fd")) == before
    near.close()
    far.close()
    os.close(file)
