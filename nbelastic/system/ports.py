"""Ports that a listener finds free when it is restarted."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Iterator, Sequence

ATTEMPTS = 20  # ports that are tried until one is free at all addresses
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
def reserved_port(addresses: Sequence[str]) -> Iterator[int]:
    """A port that is free at all of these addresses, bound meanwhile: only a listener with SO_REUSEADDR gets it, such as ZeroMQ's.

    Addresses that this machine does not have are left out. OSError if there is no such port.
    """
    for left in reversed(range(ATTEMPTS)):
        with contextlib.ExitStack() as held:
            try:
                port = _bind_all(addresses, held)
            except OSError:  # another process uses the port at one of the addresses
                if not left:
                    raise
                continue
            yield port
            return


def _bind_all(addresses: Sequence[str], held: contextlib.ExitStack) -> int:
    port = 0
    for address in addresses:
        bound = held.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
        try:
            bound.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            continue  # this machine does not have the address (any more), or not yet
        # From now on a listener with this option may bind, as this socket does not listen.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = int(bound.getsockname()[1])
    return port
