"""Addresses and endpoints as text."""

from __future__ import annotations


def is_loopback(address: str) -> bool:
    """Whether only this machine itself is reached there."""
    return address.startswith("127.") or address == "::1"


def parted(endpoint: str) -> tuple[str, int]:
    """Of "10.0.0.2:4711" and "tcp://[fd00::2]:4711": 10.0.0.2 and fd00::2, with their ports. ValueError if there is none."""
    address, _, port = endpoint.rpartition("://")[2].rpartition(":")
    return address.strip("[]"), int(port)


def address_of(endpoint: str) -> str:
    """The first part of that, whatever the second is."""
    return endpoint.rpartition("://")[2].rpartition(":")[0].strip("[]")


def bracketed(address: str) -> str:
    """As it stands before a port: fd00::2 as "[fd00::2]", anything else as it is."""
    return f"[{address}]" if ":" in address else address
