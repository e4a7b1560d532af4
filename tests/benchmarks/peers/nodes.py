"""Nodes that come and go: what each system does with the orders of `tests.benchmarks.replay`, lines on standard input."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol

import psutil
from torch.distributed import TCPStore

LOOK = 0.1  # seconds between two checks for processes that have ended, as in torchrun


class Nodes(Protocol):
    """The nodes of a system; each has one worker."""

    def join(self, node: int) -> None:
        """Start the node."""

    def leave(self, node: int) -> None:
        """SIGKILL all processes of the node, which does not come back by itself."""

    def kill(self, node: int) -> None:
        """SIGKILL the worker of the node, which the system replaces."""

    def tend(self) -> None:
        """Do what the system's own supervision does; called every `LOOK` seconds."""


def obey(nodes: Nodes) -> None:
    """Carry out the orders, until standard input ends."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while True:
            if selector.select(LOOK):
                received = os.read(sys.stdin.fileno(), 4096)
                if not received:
                    return
                *lines, rest = (rest + received).split(b"\n")
                for line in lines:
                    kind, node = line.decode().split()
                    print("order:", kind, node, flush=True)
                    {"join": nodes.join, "leave": nodes.leave, "kill": nodes.kill}[kind](int(node))
            nodes.tend()


def kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:  # it ended a moment ago
            continue


class ProcessNodes:
    """Each node is a process that `command` starts; one that ends by itself is started again, as a cluster would."""

    def __init__(self, command: Callable[[int], list[str]], *, is_worker: bool) -> None:
        self._command, self._is_worker = command, is_worker
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def join(self, node: int) -> None:
        self._running[node] = subprocess.Popen(self._command(node), stdin=subprocess.DEVNULL)

    def leave(self, node: int) -> None:
        process = self._running.pop(node)
        family = psutil.Process(process.pid)
        kill_all([family, *family.children(recursive=True)])
        process.wait()

    def kill(self, node: int) -> None:
        process = psutil.Process(self._running[node].pid)
        kill_all([process] if self._is_worker else process.children(recursive=True))

    def tend(self) -> None:
        for node, process in self._running.items():
            if process.poll() is not None:
                print(f"node {node} ended with {process.returncode} and is started again", flush=True)
                self.join(node)

    def end(self) -> None:
        for node in list(self._running):
            self.leave(node)


def until_sigterm(nodes: ProcessNodes, workers: int) -> None:
    """Start so many nodes and obey, until SIGTERM or the end of standard input; then kill all."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        for node in range(workers):
            nodes.join(node)
        obey(nodes)
    finally:
        nodes.end()


def store_on_loopback() -> TCPStore:
    """Return a store that other machines cannot reach."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
