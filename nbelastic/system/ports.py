"""Ports that a listener finds free when it is restarted."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

SMALLEST_RANGE = 1600  # ports; from a smaller range none is chosen


def random_ports(count: int, lowest: int) -> list[int]:
    """Choose `count` ports at random between `lowest` and the system's ephemeral ports; [] if that range is too small.

    The system gives an ephemeral port to any connection. So another process may take it before the listener is restarted.
    And a client that tries it repeatedly may be given it for its own end; it is then connected to itself.
    """
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            low = int(file.read().split()[0])
    except OSError:
        low = 32768
    dice = random.SystemRandom()  # the user may have seeded the global generator
    return dice.sample(range(lowest, low), count) if low - lowest >= SMALLEST_RANGE else []


def is_free(address: str, port: int) -> bool:
    """Whether no socket is bound to this port of an address.

    ZeroMQ would bind to a port that another process has bound to but does not listen at yet; that one could not listen then.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def reserved_port(address: str) -> Iterator[int]:
    """A free port of `address`, bound meanwhile, so that no other process gets it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.bind((address, 0))
        yield int(bound.getsockname()[1])
