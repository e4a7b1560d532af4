"""The network interfaces of this machine by their addresses."""

from __future__ import annotations

import psutil

from nbelastic.system.addresses import is_loopback

LOOPBACK = "lo"


def interface_of(address: str) -> str:
    """The name of the interface that has `address`; the loopback interface for any loopback address. OSError if none has it."""
    if is_loopback(address):
        return LOOPBACK
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    raise OSError(f"no interface of this machine has the address {address}")
