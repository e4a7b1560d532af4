"""Network interfaces of this machine and their addresses."""

from __future__ import annotations

import socket

import psutil

from nbelastic.system.addresses import is_loopback

LOOPBACK = "lo"


def interface_of(address: str) -> str:
    """The name of the interface that has `address`; for any loopback address `lo`. OSError if no interface has it."""
    if is_loopback(address):
        return LOOPBACK
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    raise OSError(f"no interface of this machine has the address {address}")


def address_towards(target: str) -> str:
    """The address of this machine on the route to the address `target`, with an IPv6 scope if it has one.

    OSError if there is no route. Connecting a UDP socket sends nothing.
    """
    with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])
