"""The part of `nbelastic doctor` that runs on a host: prints what it finds there, then tries to connect to other hosts.

It reads one line of JSON with the targets from its standard input, and ends with that, or after `LIFETIME`.
"""

from __future__ import annotations

import ipaddress
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import psutil

from nbelastic.agent.gpu_samples import Gpus
from nbelastic.protocol.host_facts import MARK, HostFacts, Reached, Target
from nbelastic.system import open_files, versions

GPU_TIMEOUT = 10.0  # seconds for NVML
CONNECT_TIMEOUT = 3.0  # seconds per target
LIFETIME = 180  # seconds after which this process ends, also if ssh does not notice that the doctor has ended
HALF = 16  # bytes: a caller sends the first half of the token, and receives the second one


def main() -> None:
    """Print the facts, read the targets, print what was reached, and wait for the end of the input."""
    signal.alarm(LIFETIME)
    addresses, token = _addresses(), secrets.token_hex(HALF)
    ports = _listen((address for group in addresses.values() for address in group), token.encode())
    gpus, limit = Gpus().find(GPU_TIMEOUT), open_files.raise_limit()
    _print(HostFacts(versions.installed(), sys.executable, addresses, ports, token, gpus, limit))
    targets = msgspec.json.decode(sys.stdin.readline() or "[]", type=list[Target])
    with ThreadPoolExecutor(max_workers=64) as threads:
        _print(list(threads.map(_reach, targets)))
    sys.stdin.read()  # until then other hosts may connect to this one


def _print(answer: object) -> None:
    print(f"{MARK}{msgspec.json.encode(answer).decode()}", flush=True)


def _listen(addresses: Iterable[str], token: bytes) -> dict[str, int]:
    """Listen at each address; returns the ports."""
    ports = {}
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError):  # it has just gone, or is an IPv6 address that is still being checked
            listener = socket.create_server((address, 0), family=family)
            threading.Thread(target=_serve, args=(listener, token), daemon=True).start()
            ports[address] = int(listener.getsockname()[1])
    return ports


def _serve(listener: socket.socket, token: bytes) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, token), daemon=True).start()


def _answer(connection: socket.socket, token: bytes) -> None:
    """Close the connection of a stranger without an answer."""
    with connection, suppress(OSError):
        connection.settimeout(CONNECT_TIMEOUT)
        if secrets.compare_digest(_receive(connection), token[:HALF]):
            connection.sendall(token[HALF:])


def _receive(connection: socket.socket) -> bytes:
    """Half a token, or less if the other end closes the connection."""
    data = b""
    while len(data) < HALF and (more := connection.recv(HALF - len(data))):
        data += more
    return data


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
            connection.sendall(target.token[:HALF].encode())
            answer = _receive(connection)
    except OSError as error:
        return Reached(target.host, target.address, error.strerror or str(error) or type(error).__name__)
    return Reached(
        target.host, target.address, "" if answer == target.token[HALF:].encode() else "another host has this address"
    )
