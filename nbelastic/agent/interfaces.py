"""Which network interfaces reach the driver and the other hosts, and where."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from nbelastic.protocol.ids import Interface
from nbelastic.system.addresses import is_loopback
from nbelastic.system.interfaces import LOOPBACK

ANYWHERE = (
    "192.0.2.1",
    "2001:db8::1",
)  # addresses of nobody (RFC 5737, RFC 3849): the way to them is the default route
BRIDGES = (  # of virtual machines and containers: other machines do not reach them, and many hosts have the same
    *("docker", "br-", "virbr", "veth", "lxcbr", "lxdbr", "cni", "flannel", "cali", "podman", "vboxnet", "vmnet"),
)


def outgoing_address(driver: str) -> str:
    """The address of this machine towards `driver` (an address). Nothing is sent: a connected UDP socket tells."""
    family = socket.AF_INET6 if ":" in driver else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((driver, 9))
        return str(probe.getsockname()[0]).partition("%")[0]


def candidates(driver: str, nics: Sequence[str] = (), local: bool = False) -> tuple[Interface, ...]:
    """Where the other hosts may reach this one, in order of preference.

    The address from which it reaches `driver` (an address) comes first; then the default route's, and the others, IPv4
    before IPv6. On the driver's own machine (`local`) loopback comes before all: `driver` itself, if it is a loopback
    address. `nics` are names of interfaces, or comma-separated lists of such: only these then. Left out are interfaces
    that are down, addresses of one link only, and the bridges of containers unless they reach the driver or are named.

    OSError if one of `nics` is unknown, or there is no address.
    """
    chosen = [name for text in nics for name in text.replace(" ", "").split(",") if name]
    known = psutil.net_if_addrs()
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise OSError(f"there is no network interface {unknown[0]} here: it has {', '.join(known)}")
    towards = _ways(driver)
    found = [i for i in _outward(known) if i.name in chosen or not chosen]
    found = [i for i in found if i.name in chosen or i.address in towards[:1] or not i.name.startswith(BRIDGES)]
    found.sort(key=lambda i: (towards.index(i.address) if i.address in towards else len(towards), ":" in i.address))
    if local and (not chosen or LOOPBACK in chosen):
        found.insert(0, Interface(LOOPBACK, driver if is_loopback(driver) else "127.0.0.1"))
    if not found:
        where = f"none of {', '.join(chosen)} is up with an address" if chosen else "no interface is up with an address"
        raise OSError(f"{where} that other machines could reach: it has {', '.join(known)}")
    return tuple(found)


def _ways(driver: str) -> list[str]:
    """The addresses of this machine towards the driver and towards anywhere, if they are no loopback ones."""
    ways = []
    for address in (driver, *ANYWHERE):
        with contextlib.suppress(OSError):
            ways.append(outgoing_address(address))
    return [way for way in dict.fromkeys(ways) if not is_loopback(way)]


def _outward(known: Mapping[str, Sequence[Any]]) -> list[Interface]:
    """Addresses of interfaces that are up, but for loopback and link-local ones."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    entries = [
        Interface(name, entry.address.partition("%")[0])
        for name, addresses in known.items()
        for entry in addresses
        if name in up and entry.family in families
    ]
    return [i for i in entries if not is_loopback(i.address) and not i.address.startswith(("fe80:", "169.254."))]
