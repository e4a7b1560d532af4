"""The part of `nbelastic doctor` that runs on a host: prints what it finds there, then tries to connect to other hosts.

It reads one line of JSON with the targets from its standard input, and ends with that.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import psutil

from nbelastic.agent.gpu_samples import Gpus
from nbelastic.protocol.host_facts import MARK, HostFacts, Reached, Target
from nbelastic.system import open_files, versions

GPU_TIMEOUT = 10.0  # seconds for NVML
CONNECT_TIMEOUT = 3.0  # seconds per target


def main() -> None:
    """Print the facts, read the targets, print what was reached, and wait for the end of the input."""
    listener, token = _listen(), secrets.token_hex(8)
    threading.Thread(target=_answer, args=(listener, token.encode()), daemon=True).start()
    port = int(listener.getsockname()[1])
    gpus, limit = Gpus().find(GPU_TIMEOUT), open_files.raise_limit()
    _print(HostFacts(versions.installed(), sys.executable, _addresses(), port, token, gpus, limit))
    targets = msgspec.json.decode(sys.stdin.readline() or "[]", type=list[Target])
    with ThreadPoolExecutor(max_workers=64) as threads:
        _print(list(threads.map(_reach, targets)))
    sys.stdin.read()  # until then other hosts may connect to this one


def _print(answer: object) -> None:
    print(f"{MARK}{msgspec.json.encode(answer).decode()}", flush=True)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 is switched off
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", 0))  # noqa: S104  (it gives a random token and reads nothing)


def _answer(listener: socket.socket, token: bytes) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(token)


def _addresses() -> dict[str, tuple[str, ...]]:
    """The addresses of each interface that is up and leads to other machines."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {
        name: tuple(
            entry.address
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6) and _leads_out(entry.address)
        )
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def _leads_out(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_link_local)


def _reach(target: Target) -> Reached:
    try:
        with socket.create_connection((target.address, target.port), CONNECT_TIMEOUT) as connection:
            answer = connection.recv(64).decode(errors="replace")
    except OSError as error:
        return Reached(target.host, target.address, error.strerror or str(error) or type(error).__name__)
    return Reached(target.host, target.address, "" if answer == target.token else "another host has this address")
