"""TCP proxies: each lets other machines connect to loopback ports of this one, through one of its addresses.

The driver's server and ipyparallel's controller listen on the loopback interface only. If a host is not local, a separate
process forwards connections to them: a flood of connections then exhausts the proxy's descriptors, not the kernel's. The
proxy forwards bytes without reading them. A peer still needs the cluster's CURVE key.
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
from nbelastic.system.backoff import Backoff
from nbelastic.system.driver_lease import DriverLease
from nbelastic.system.engine_ports import engine_ports
from nbelastic.system.process_identity import identity, is_alive, pid_of
from nbelastic.system.processes import is_stopped, kill_group

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0  # seconds from one restart of a process to the next


class SavedProxy(msgspec.Struct, frozen=True):
    """A proxy's process (`pid@start`), and its ports on `address`, by the loopback port to which each leads."""

    process: str
    address: str
    ports: dict[int, int]


class TcpProxy:
    """Forwards ports on `address` to loopback ports. Its processes end with `close()`, or when the driver's lease expires.

    `workers()`: the number of workers that the cluster wants; limits on connections grow with it.
    """

    def __init__(self, address: str, driver_lease: DriverLease, workers: Callable[[], int] = lambda: 0) -> None:
        self.address, self._workers = address, workers
        self._driver_lease = driver_lease
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, dict[int, int]] = {}  # by process
        self._backoff, self._restart_at = Backoff(FIRST_PAUSE, LONGEST_PAUSE), -LONGEST_PAUSE

    def open(self, ports: Iterable[int]) -> dict[int, int]:
        """The port on `address` that leads to each of `ports`. OSError if this machine does not have the address."""
        return self._open(dict.fromkeys(ports, 0))

    def _open(self, ports: Mapping[int, int]) -> dict[int, int]:
        """`ports`: the port on `address` for each loopback port; 0: any free one."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        opened: dict[int, int] = {}
        with contextlib.ExitStack() as listeners:
            fds = {}
            for port, proxy_port in ports.items():
                listener = listeners.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((self.address, proxy_port))
                listener.listen(256)
                opened[port] = listener.getsockname()[1]
                fds[listener.fileno()] = port
            code = "from nbelastic.provision.tcp_proxy_process import main; main()"
            arguments = (json.dumps(list(fds.items())), str(self._workers()), json.dumps(self._driver_lease))
            command = [sys.executable, "-c", code, *arguments]
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=list(fds), start_new_session=True)
        process = identity(child.pid)
        self._children[process], self._ports[process] = child, opened
        return opened

    def adopt(self, process: str, ports: dict[int, int]) -> None:
        """Take over a process that an earlier driver has started."""
        self._ports[process] = ports

    def restart_dead(self, now: float) -> int:
        """Replace processes that have ended or are stopped, at the same ports; peers reconnect by themselves.

        Return the number of replaced processes. While they keep ending, the pause between two restarts doubles.
        """
        dead = [process for process in self._ports if not is_alive(process) or is_stopped(pid_of(process))]
        if not dead or now < self._restart_at:
            return 0
        if now - self._restart_at >= LONGEST_PAUSE:
            self._backoff.reset()
        self._restart_at = now + self._backoff.next()
        return sum(self._restart(process) for process in dead)

    def _restart(self, process: str) -> bool:
        ports = self._ports[process]
        self._end(process)
        try:
            self._open(ports)
        except OSError:  # another process has a port now; the next call tries again
            self._ports[process] = ports
            return False
        return True

    @property
    def saved(self) -> list[SavedProxy]:
        """The processes, for another driver."""
        return [SavedProxy(process, self.address, ports) for process, ports in self._ports.items()]

    def _end(self, process: str) -> None:
        del self._ports[process]
        child = self._children.pop(process, None)
        if child is not None:
            child.kill()
            child.communicate()
        elif is_alive(process):
            kill_group(pid_of(process))

    def close(self) -> None:
        for process in list(self._ports):
            self._end(process)


class ProxySet:
    """A cluster's TCP proxies: one for each address of this machine to which other hosts connect.

    `workers()`: the number of workers that the cluster wants. All of them may connect from one address.
    """

    def __init__(self, driver_lease: DriverLease, workers: Callable[[], int] = lambda: 0) -> None:
        self._driver_lease, self._workers = driver_lease, workers
        self._proxies: dict[str, TcpProxy] = {}
        self._endpoints: dict[tuple[str, str], str] = {}

    def adopt(self, endpoints: Iterable[tuple[str, str, str]], proxies: Iterable[SavedProxy]) -> None:
        """Take over the proxies of an earlier driver: its `endpoints` and `saved`."""
        self._endpoints = {(address, endpoint): proxied for address, endpoint, proxied in endpoints}
        for proxy in proxies:
            self._proxy(proxy.address).adopt(proxy.process, proxy.ports)
        self.restart_dead()

    def restart_dead(self) -> list[str]:
        """Replace processes that have ended; call this regularly. Return the addresses of the replaced processes."""
        now = time.monotonic()
        return [address for address, proxy in self._proxies.items() if proxy.restart_dead(now)]

    @property
    def endpoints(self) -> tuple[tuple[str, str, str], ...]:
        """Address, loopback endpoint and proxied endpoint, for another driver."""
        return tuple((*key, proxied) for key, proxied in self._endpoints.items())

    @property
    def saved(self) -> tuple[SavedProxy, ...]:
        """The processes, for another driver."""
        return tuple(process for proxy in self._proxies.values() for process in proxy.saved)

    def proxied_endpoint(self, address: str, endpoint: str) -> str:
        """The endpoint on `address` that leads to `endpoint`, which is `tcp://127.0.0.1:<port>`."""
        if (address, endpoint) not in self._endpoints:
            port = int(endpoint.rpartition(":")[2])
            proxy_port = self._proxy(address).open([port])[port]
            self._endpoints[address, endpoint] = f"tcp://{bracketed(address)}:{proxy_port}"
        return self._endpoints[address, endpoint]

    def proxied_connection(self, address: str, connection: str) -> str:
        """ipyparallel's connection information (JSON) for engines that connect to `address`; empty: a local engine."""
        if not address:
            return connection
        if (address, connection) not in self._endpoints:
            info = json.loads(connection)
            opened = self._proxy(address).open(engine_ports(connection))
            for name, value in info.items():
                if isinstance(value, list):
                    info[name] = [opened[port] for port in value]
                elif isinstance(value, int):
                    info[name] = opened[value]
            info["interface"] = f"tcp://{bracketed(address)}"
            self._endpoints[address, connection] = json.dumps(info)
        return self._endpoints[address, connection]

    def _proxy(self, address: str) -> TcpProxy:
        return self._proxies.setdefault(address, TcpProxy(address, self._driver_lease, self._workers))

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.close()
