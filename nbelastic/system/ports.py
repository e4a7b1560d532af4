"""Ports that a listener finds free when it comes back."""

from __future__ import annotations

import random
import socket

ROOM = 1600  # ports there have to be to choose from


def chosen(count: int, lowest: int) -> list[int]:
    """So many, at random, from `lowest` up to those that the system gives to connections; none if there are too few.

    Nobody gets one of them by accident meanwhile. And who tries to connect again and again to a port out of the system's
    range, at which nobody listens, gets that very port for its own end one day, and is connected to itself.
    """
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            low = int(file.read().split()[0])
    except OSError:
        low = 32768
    dice = random.SystemRandom()  # the other ones are the user's
    return dice.sample(range(lowest, low), count) if low - lowest >= ROOM else []


def is_free(address: str, port: int) -> bool:
    """Whether nobody listens at this port of an address, or holds it to listen there later.

    ZeroMQ would take one that is only held, and whoever holds it could not listen there any more.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
