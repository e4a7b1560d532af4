"""The addresses of this host at which other hosts may reach it, in order of preference."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from nbelastic.protocol.ids import Interface
from nbelastic.system.addresses import is_loopback
from nbelastic.system.interfaces import LOOPBACK, address_towards

# Documentation addresses (RFC 5737, RFC 3849), which no host has: the route to them is the default route.
ANYWHERE = ("192.0.2.1", "2001:db8::1")
BRIDGES = (  # of virtual machines and containers: other machines cannot reach them, and many hosts have the same ones
    *("docker", "br-", "virbr", "veth", "lxcbr", "lxdbr", "cni", "flannel", "cali", "podman", "vboxnet", "vmnet"),
)


def addresses_by_preference(driver: str, nics: Sequence[str] = (), local: bool = False) -> tuple[Interface, ...]:
    """The addresses at which other hosts may reach this one, in order of preference.

    First the address on the route to the address `driver`, then that of the default route, then the others, IPv4 before
    IPv6. On the driver's machine (`local`) a loopback address comes first: `driver`, if it is one. `nics`: names of
    interfaces, or comma-separated lists of names; other interfaces are left out. Always left out: interfaces that are down,
    link-local addresses, and bridges of containers, unless the driver is reached through them or `nics` has them.

    OSError if one of `nics` is unknown, or if there is no address.
    """
    chosen = [name for text in nics for name in text.replace(" ", "").split(",") if name]
    known = psutil.net_if_addrs()
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise OSError(f"there is no network interface {unknown[0]} here: it has {', '.join(known)}")
    on_routes = _addresses_on_routes(driver)
    found = [i for i in _external_addresses(known) if i.name in chosen or not chosen]
    found = [i for i in found if i.name in chosen or i.address in on_routes[:1] or not i.name.startswith(BRIDGES)]
    found.sort(
        key=lambda i: (on_routes.index(i.address) if i.address in on_routes else len(on_routes), ":" in i.address)
    )
    if local and (not chosen or LOOPBACK in chosen):
        found.insert(0, Interface(LOOPBACK, driver if is_loopback(driver) else "127.0.0.1"))
    if not found:
        where = f"none of {', '.join(chosen)} is up with an address" if chosen else "no interface is up with an address"
        raise OSError(f"{where} that other machines could reach: it has {', '.join(known)}")
    return tuple(found)


def _addresses_on_routes(driver: str) -> list[str]:
    """The addresses of this host on the route to the driver and on the default routes, without loopback ones."""
    found = []
    for address in (driver, *ANYWHERE):
        with contextlib.suppress(OSError):
            found.append(address_towards(address).partition("%")[0])
    return [address for address in dict.fromkeys(found) if not is_loopback(address)]


def _external_addresses(known: Mapping[str, Sequence[Any]]) -> list[Interface]:
    """Addresses of interfaces that are up, without loopback and link-local ones."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    entries = [
        Interface(name, entry.address.partition("%")[0])
        for name, addresses in known.items()
        for entry in addresses
        if name in up and entry.family in families
    ]
    return [i for i in entries if not is_loopback(i.address) and not i.address.startswith(("fe80:", "169.254."))]
