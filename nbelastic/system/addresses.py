"""Addresses and endpoints as text. An endpoint is an address and a port: `10.0.0.2:4711`, `tcp://[fd00::2]:4711`."""

from __future__ import annotations


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine reach the address."""
    return address.startswith("127.") or address == "::1"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """The address, without brackets, and the port. ValueError if there is no port."""
    return address_of(endpoint), int(endpoint.rpartition(":")[2])


def address_of(endpoint: str) -> str:
    """The address in an endpoint, without brackets. The port may be anything, such as `*`."""
    return endpoint.rpartition("://")[2].rpartition(":")[0].strip("[]")


def bracketed(address: str) -> str:
    """The address as it is written before a port: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
