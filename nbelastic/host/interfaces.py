"""Which network interface reaches the driver, and so the other hosts."""

from __future__ import annotations

import socket

import psutil

LOOPBACK = "lo"


def outgoing_address(driver: str) -> str:
    """The address of this machine towards `driver` (an address). Nothing is sent: a connected UDP socket tells."""
    family = socket.AF_INET6 if ":" in driver else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((driver, 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the interface that has `address`; the loopback interface for any loopback address."""
    if address.startswith("127.") or address == "::1":
        return LOOPBACK
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    raise OSError(f"no interface of this machine has the address {address}")
