"""Whether a host is this machine, and which address of this machine leads to it."""

from __future__ import annotations

import asyncio
import getpass
import socket
from contextlib import suppress

import psutil

from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.settings import SSH
from nbelastic.provision import ssh
from nbelastic.system.addresses import is_loopback
from nbelastic.system.interfaces import address_towards

ANYWHERE = ("198.51.100.1", "2001:db8::1")  # reserved for documentation (RFC 5737, RFC 3849); nothing is sent


async def locate(spec: HostSpec, launcher: str) -> tuple[str, str]:
    """The host's loopback address if it is this machine, and this machine's address towards the host if it is not.

    The other of the two is empty. With a batch system the host's name is not an address, unless it is a loopback name.
    """
    if launcher != SSH and not spec.name.startswith(("localhost", "127.")):
        return "", await _own_address_for_jobs()
    if not spec.user or spec.user == getpass.getuser():
        local = _loopback_address(await _addresses(spec.name))
        if local:
            return local, ""
    addresses = await _addresses(await ssh.real_name(spec))
    return "", _own_address_towards(addresses[0] if addresses else "")


async def driver_address_towards(spec: HostSpec) -> str:
    """The address of this machine towards a host that ssh knows; empty if they are the same. OSError without a route."""
    addresses = await _addresses(spec.name) or await _addresses(await ssh.real_name(spec))
    if not addresses:
        raise OSError(f"{spec.name} is an unknown name: check it, or give the address")
    if _loopback_address(addresses):
        return ""
    own_address = _own_address_towards(addresses[0])
    if is_loopback(own_address):
        raise OSError(f"there is no route from this machine to {spec.name} ({addresses[0]})")
    return own_address


def _loopback_address(addresses: list[str]) -> str:
    """The loopback address of a host with these addresses if it is this machine; else empty."""
    loopback = sorted(filter(is_loopback, addresses))
    if loopback:
        return loopback[0]
    own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    return "127.0.0.1" if own.intersection(addresses) else ""


async def _own_address_for_jobs() -> str:
    """The address of this machine at which batch jobs and pods reach it: on a default route, else that of its name."""
    for target in ANYWHERE:
        with suppress(OSError):
            return address_towards(target)
    named = await _addresses(socket.gethostname())  # the nodes of a closed network need no default route
    return next((address for address in named if not is_loopback(address)), "127.0.0.1")


def _own_address_towards(target: str) -> str:
    """The address of this machine towards `target`; towards the internet if it is empty, as behind a jump host."""
    try:
        return address_towards(target or ANYWHERE[0])
    except OSError:
        return "127.0.0.1"  # ssh will report the cause


async def _addresses(name: str) -> list[str]:
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a HostName of ~/.ssh/config that a ProxyCommand alone knows may be no name of DNS
        return []
    return [str(info[4][0]) for info in infos]
