"""Only the given addresses can connect to a listener."""

import contextlib
import os
import socket

import pytest

from nbelastic.worker import socket_filter
from nbelastic.worker.socket_filter import admit_all, admit_only
from nbelastic.worker.sockets import ends_of, listeners


@contextlib.contextmanager
def listening(address="127.0.0.1"):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
        one.bind((address, 0))
        one.listen(16)
        yield one


def can_connect(listener, source):
    """Whether a connection from `source` succeeds."""
    with socket.socket(listener.family) as caller:
        caller.settimeout(0.3)
        caller.bind((source, 0))
        try:
            caller.connect(listener.getsockname()[:2])
        except TimeoutError:
            return False
        return True


def test_only_the_given_addresses_connect():
    """One, several or none; the newest filter counts; and `admit_all` removes it."""
    with listening() as one:
        assert can_connect(one, "127.0.0.7")
        admit_only(one.fileno(), {"127.0.0.5"})
        assert can_connect(one, "127.0.0.5")
        assert not can_connect(one, "127.0.0.6")
        admit_only(one.fileno(), {f"127.0.0.{n}" for n in range(6, 200)})
        assert [n for n in (5, 6, 7, 150, 199, 200) if can_connect(one, f"127.0.0.{n}")] == [6, 7, 150, 199]
        admit_only(one.fileno(), ())
        assert not can_connect(one, "127.0.0.6")
        admit_all(one.fileno())
        admit_all(one.fileno())
        assert can_connect(one, "127.0.0.200")


@pytest.mark.parametrize("most", [4096, 60_000])
def test_too_many_addresses_for_a_filter(most, monkeypatch):
    """Then every address can connect, also if no one could before: whether we know Linux's limit, or Linux refuses the filter."""
    monkeypatch.setattr(socket_filter, "_MAX_INSTRUCTIONS", most)
    with listening() as one:
        admit_only(one.fileno(), ())
        admit_only(one.fileno(), {f"10.0.{n // 250}.{n % 250}" for n in range(2000)})
        assert can_connect(one, "127.0.0.1")


def test_ipv6_addresses():
    """All four words of an address are compared; addresses of the other family have no effect."""
    with listening("::1") as one:
        admit_only(one.fileno(), ("127.0.0.1", "::2", "1::1", "0:0:1::1"))
        assert not can_connect(one, "::1")
        admit_only(one.fileno(), ("::2", "::1", "fd00::1"))
        assert can_connect(one, "::1")


def test_existing_connections_are_not_affected():
    """A connection made before the filter works in both directions."""
    with listening() as one, socket.create_connection(one.getsockname()) as caller:
        accepted, _ = one.accept()
        with accepted:
            admit_only(one.fileno(), ())
            caller.sendall(b"there")
            assert accepted.recv(10) == b"there"
            accepted.sendall(b"and back")
            assert caller.recv(10) == b"and back"
            assert ends_of(caller.fileno()) == ends_of(accepted.fileno())[::-1]
            assert [*listeners([one.fileno(), caller.fileno(), accepted.fileno()])] == [one.fileno()]


def test_more_addresses_than_the_kernel_takes():
    """Then all addresses can connect: no filter is better than one that excludes members."""
    with listening() as one:
        admit_only(one.fileno(), {f"10.{a}.{b}.1" for a in range(20) for b in range(100)})
        assert can_connect(one, "127.0.0.7")


@pytest.mark.parametrize("kind", ["a file", "closed", "between processes"])
def test_other_descriptors_are_left_alone(kind, tmp_path):
    """No error, and no descriptor leaks."""
    near, far = socket.socketpair()
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)
    fd = {"a file": file, "closed": 9999, "between processes": near.fileno()}[kind]
    before = len(os.listdir("/proc/self/fd"))
    admit_only(fd, ())
    admit_all(fd)
    assert listeners([fd]) == {}
    assert ends_of(fd) == ()
    assert len(os.listdir("/proc/self/fd")) == before
    near.close()
    far.close()
    os.close(file)
