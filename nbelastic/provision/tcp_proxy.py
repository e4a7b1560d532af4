"""What other machines may connect to: doors on one address of this machine, each to one of our loopback ports.

The hub and ipyparallel's controller listen on the loopback interface only. A process of its own stands before them as
soon as a host is not local: a flood of connections fills its descriptors, not the kernel's. It looks into nothing: who
comes through still needs the cluster's CURVE key.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from nbelastic.system.addresses import bracketed
from nbelastic.system.driver_lease import DriverLease
from nbelastic.system.process_identity import identity, is_alive, pid_of
from nbelastic.system.processes import is_stopped, kill_group

PAUSE, LONGEST_PAUSE = 0.2, 30.0  # seconds from one replacement of a process to the next; they double


class SavedGate(msgspec.Struct, frozen=True):
    """A process of a gate, as `pid@start`, and its doors on `address`: port there by port here."""

    process: str
    address: str
    doors: dict[int, int]


class Gate:
    """Doors from `address` to loopback ports; their processes end with `close()`, or when no driver comes any more."""

    def __init__(self, address: str, driver_lease: DriverLease, workers: Callable[[], int] = lambda: 0) -> None:
        self.address, self._workers = address, workers
        self._driver_lease = driver_lease
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._doors: dict[str, dict[int, int]] = {}  # by process
        self._pause, self._again_at = 0.0, -LONGEST_PAUSE  # when a process may be replaced again

    def open(self, ports: Iterable[int]) -> dict[int, int]:
        """The port on `address` that leads to each of `ports`. OSError if the address is not this machine's."""
        return self._open(dict.fromkeys(ports, 0))

    def _open(self, wanted: Mapping[int, int]) -> dict[int, int]:
        """The same at these ports there; 0: any."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        doors: dict[int, int] = {}
        with contextlib.ExitStack() as listeners:
            fds = {}
            for port, there in wanted.items():
                listener = listeners.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((self.address, there))
                listener.listen(256)
                doors[port] = listener.getsockname()[1]
                fds[listener.fileno()] = port
            code = "from nbelastic.provision.tcp_proxy_process import main; main()"
            told = (json.dumps(list(fds.items())), str(self._workers()), json.dumps(self._driver_lease))
            command = [sys.executable, "-c", code, *told]
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=list(fds), start_new_session=True)
        process = identity(child.pid)
        self._children[process], self._doors[process] = child, doors
        return doors

    def adopt(self, process: str, doors: dict[int, int]) -> None:
        """One that another driver has opened."""
        self._doors[process] = doors

    def mend(self, now: float) -> int:
        """Replace processes that have ended or are stopped, with the same doors: callers come back by themselves.

        Returns how many were replaced. A process that ends soon after its start waits, twice as long each time.
        """
        dead = [process for process in self._doors if not is_alive(process) or is_stopped(pid_of(process))]
        if not dead or now < self._again_at:
            return 0
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if now - self._again_at < LONGEST_PAUSE else PAUSE
        self._again_at = now + self._pause
        return sum(self._replace(process) for process in dead)

    def _replace(self, process: str) -> bool:
        doors = self._doors[process]
        self._end(process)
        try:
            self._open(doors)
        except OSError:  # its port is taken for the moment
            self._doors[process] = doors
            return False
        return True

    @property
    def saved(self) -> list[SavedGate]:
        """For another driver."""
        return [SavedGate(process, self.address, doors) for process, doors in self._doors.items()]

    def _end(self, process: str) -> None:
        del self._doors[process]
        child = self._children.pop(process, None)
        if child is not None:
            child.kill()
            child.communicate()
        elif is_alive(process):
            kill_group(pid_of(process))

    def close(self) -> None:
        for process in list(self._doors):
            self._end(process)


class Doors:
    """The gates of a cluster, one for each address of this machine that other hosts come to.

    `workers()`: how many workers are asked for. All of them may come from one address.
    """

    def __init__(self, driver_lease: DriverLease, workers: Callable[[], int] = lambda: 0) -> None:
        self._driver_lease, self._workers = driver_lease, workers
        self._gates: dict[str, Gate] = {}
        self._links: dict[tuple[str, str], str] = {}

    def adopt(self, links: Iterable[tuple[str, str, str]], gates: Iterable[SavedGate]) -> None:
        """Those of another driver."""
        self._links = {(here, endpoint): link for here, endpoint, link in links}
        for gate in gates:
            self._gate(gate.address).adopt(gate.process, gate.doors)
        self.mend()

    def mend(self) -> list[str]:
        """To be called now and then: replace processes that have ended. Returns the addresses of those replaced."""
        now = time.monotonic()
        return [address for address, gate in self._gates.items() if gate.mend(now)]

    @property
    def links(self) -> tuple[tuple[str, str, str], ...]:
        """Where they are and lead: for another driver."""
        return tuple((*key, link) for key, link in self._links.items())

    @property
    def saved(self) -> tuple[SavedGate, ...]:
        """The processes, for another driver."""
        return tuple(process for gate in self._gates.values() for process in gate.saved)

    def lead(self, here: str, endpoint: str) -> str:
        """The endpoint `tcp://127.0.0.1:<port>` as other machines come to it at `here`."""
        if (here, endpoint) not in self._links:
            port = int(endpoint.rpartition(":")[2])
            self._links[here, endpoint] = f"tcp://{bracketed(here)}:{self._gate(here).open([port])[port]}"
        return self._links[here, endpoint]

    def lead_engines(self, here: str, connection: str) -> str:
        """ipyparallel's connection information (JSON) for engines that come to `here`; empty: on this machine."""
        if not here:
            return connection
        if (here, connection) not in self._links:
            info = json.loads(connection)
            ports = {name: value for name, value in info.items() if isinstance(value, int | list)}
            flat = [port for value in ports.values() for port in (value if isinstance(value, list) else [value])]
            doors = self._gate(here).open(flat)
            for name, value in ports.items():
                info[name] = [doors[port] for port in value] if isinstance(value, list) else doors[value]
            info["interface"] = f"tcp://{bracketed(here)}"
            self._links[here, connection] = json.dumps(info)
        return self._links[here, connection]

    def _gate(self, here: str) -> Gate:
        return self._gates.setdefault(here, Gate(here, self._driver_lease, self._workers))

    def close(self) -> None:
        for gate in self._gates.values():
            gate.close()
