"""The part of `nbelastic doctor` that runs on a host: prints what it finds there, then tries to connect to other hosts.

It reads one line of JSON with the targets from its standard input, and ends with that, or after `LIFETIME`.
"""

from __future__ import annotations

import ipaddress
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import cast

import msgspec
import psutil

from nbelastic.agent.gpu_samples import Gpus
from nbelastic.protocol.host_facts import MARK, HostFacts, Reached, Target
from nbelastic.system import open_files, versions

GPU_TIMEOUT = 10.0  # seconds for NVML
CONNECT_TIMEOUT = 3.0  # seconds per target
LIFETIME = 180  # seconds after which this process ends, also if ssh does not notice that the doctor has ended
MOST_CALLERS = 256  # connections at the same time, at all addresses; a process may open 1,024 files on many hosts
PAUSE = 0.05  # seconds after a failed accept
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
    # A login shell may have printed something without the end of a line, such as a terminal's title.
    print(f"\n{MARK}{msgspec.json.encode(answer).decode()}", flush=True)


def _listen(addresses: Iterable[str], token: bytes) -> dict[str, int]:
    """Listen at each address; returns the ports."""
    ports, listeners = {}, []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError):  # it has just gone, or is an IPv6 address that is still being checked
            listener = socket.create_server((address, 0), family=family)
            listener.setblocking(False)
            listeners.append(listener)
            ports[address] = int(listener.getsockname()[1])
    threading.Thread(target=_serve, args=(listeners, token), daemon=True).start()
    return ports


def _serve(listeners: list[socket.socket], token: bytes) -> None:
    """Accept and answer callers. Strangers can open connections too: for a new one beyond `MOST_CALLERS`, close the oldest."""
    received: dict[socket.socket, bytes] = {}  # by caller, oldest first
    with selectors.DefaultSelector() as selector:

        def close(caller: socket.socket) -> None:
            del received[caller]
            selector.unregister(caller)
            caller.close()

        for listener in listeners:
            selector.register(listener, selectors.EVENT_READ)
        while True:
            ready = {cast("socket.socket", key.fileobj) for key, _ in selector.select()}
            for caller in ready & received.keys():
                if _is_done(caller, received, token):
                    close(caller)
            for listener in ready.intersection(listeners):
                try:
                    caller, _ = listener.accept()
                except OSError:  # no free descriptors, or the caller has gone
                    time.sleep(PAUSE)
                    continue
                caller.setblocking(False)
                if len(received) >= MOST_CALLERS:
                    close(next(iter(received)))
                received[caller] = b""
                selector.register(caller, selectors.EVENT_READ)


def _is_done(caller: socket.socket, received: dict[socket.socket, bytes], token: bytes) -> bool:
    """Receive from a caller, and answer it. Returns whether to close the connection: of a stranger, without an answer."""
    try:
        more = caller.recv(HALF - len(received[caller]))
        received[caller] += more
        if len(received[caller]) == HALF and secrets.compare_digest(received[caller], token[:HALF]):
            caller.sendall(token[HALF:])
    except OSError:  # after `select` it cannot be a `BlockingIOError`: a connection has room for half a token
        return True
    return not more or len(received[caller]) == HALF


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
