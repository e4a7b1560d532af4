"""TCP proxies: each is one port of this machine at which hosts and terminals of other machines reach the cluster.

The driver's server and ipyparallel's controller listen on the loopback interface only. Batch jobs, and pods that connect
directly, reach them through a tunnel (`nbelastic.tunnel.host`); terminals reach the server alone. A separate process takes the
connections: a flood of them exhausts its descriptors, not the driver's. A peer still needs the cluster's CURVE key.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from nbelastic.system.backoff import Backoff
from nbelastic.system.driver_lease import DriverLease
from nbelastic.system.process_identity import identity, is_alive, pid_of
from nbelastic.system.processes import is_stopped, kill_group
from nbelastic.tunnel import ended_tunnels

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0  # seconds from one restart of a process to the next
PROXY = "from nbelastic.tunnel.tcp_proxy_process import main; main()"


class SavedProxy(msgspec.Struct, frozen=True):
    """A proxy's process (`pid@start`) at `address` and `port`. `server`: the loopback port of the driver's server."""

    process: str
    address: str
    port: int
    server: int


class TcpProxy:
    """One port on `address`. Its process ends with `close()`, or when the driver's lease expires.

    `server`: the loopback port to which terminals are connected. `ports`: the file that lists those to which hosts may connect.
    `workers()`: the number of workers that the cluster wants; limits on connections grow with it.
    """

    def __init__(
        self, address: str, server: int, ports: Path, driver_lease: DriverLease, workers: Callable[[], int] = lambda: 0
    ) -> None:
        self._address, self._server, self._ports, self._workers = address, server, ports, workers
        self._driver_lease = driver_lease
        self._child: subprocess.Popen[bytes] | None = None
        self._process = ""
        self.port = 0
        self._backoff, self._restart_at = Backoff(FIRST_PAUSE, LONGEST_PAUSE), -LONGEST_PAUSE

    def start(self) -> None:
        """Listen, and start the process. OSError if this machine does not have the address, or the port is in use."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._address, self.port))
            listener.listen(256)
            self.port = listener.getsockname()[1]
            settings = [listener.fileno(), self._server, str(self._ports), self._workers(), self._driver_lease]
            command = [sys.executable, "-P", "-c", PROXY, json.dumps(settings)]
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()], start_new_session=True
            )
        self._process = identity(self._child.pid)

    @classmethod
    def adopted(
        cls, saved: SavedProxy, ports: Path, driver_lease: DriverLease, workers: Callable[[], int] = lambda: 0
    ) -> TcpProxy:
        """Take over the process that an earlier driver has started."""
        proxy = cls(saved.address, saved.server, ports, driver_lease, workers)
        proxy._process, proxy.port = saved.process, saved.port
        return proxy

    def restart_if_dead(self, now: float) -> bool:
        """Replace a process that has ended or is stopped, at the same port; peers reconnect by themselves.

        Return whether it was replaced. While it keeps ending, the pause between two restarts doubles.
        """
        is_dead = not is_alive(self._process) or is_stopped(pid_of(self._process))
        if not is_dead or now < self._restart_at:
            return False
        if now - self._restart_at >= LONGEST_PAUSE:
            self._backoff.reset()
        self._restart_at = now + self._backoff.next()
        self.close()
        try:
            self.start()
        except OSError:  # another process has the port now; the next call tries again
            return False
        return True

    @property
    def saved(self) -> SavedProxy:
        """The process, for another driver."""
        return SavedProxy(self._process, self._address, self.port, self._server)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None
        elif is_alive(self._process):
            kill_group(pid_of(self._process))


class ProxySet:
    """A cluster's TCP proxies: one for each address of this machine to which others connect.

    `ports`: the file that lists the loopback ports to which hosts may connect. `workers()`: the number of workers that the
    cluster wants. All of them may connect from one address. `on_tunnel_end(host, number of its agent)` is called in the loop's
    thread when a host's tunnel has ended. The host opens another one if it lives.
    """

    def __init__(
        self,
        ports: Path,
        driver_lease: DriverLease,
        workers: Callable[[], int] = lambda: 0,
        on_tunnel_end: Callable[[str, int], None] | None = None,
    ) -> None:
        self._settings = (ports, driver_lease, workers)
        self._on_tunnel_end = on_tunnel_end
        self._proxies: dict[str, TcpProxy] = {}  # by address
        self._listener: socket.socket | None = None  # for the ends of tunnels

    def adopt(self, saved: Iterable[SavedProxy]) -> None:
        """Take over the proxies of an earlier driver."""
        self._proxies = {each.address: TcpProxy.adopted(each, *self._settings) for each in saved}
        self.restart_dead()

    def _listen(self) -> None:
        """Listen for the ends of tunnels. Hosts work without that too: then only their silence shows that they are lost."""
        if self._proxies and self._listener is None and self._on_tunnel_end is not None:
            with suppress(OSError):  # no descriptor is free, or the disk is full: `restart_dead` tries again
                self._listener = ended_tunnels.listen(self._settings[0].parent)
                asyncio.get_running_loop().add_reader(self._listener, self._read_end)

    def _read_end(self) -> None:
        ended = ended_tunnels.read(self._listener) if self._listener is not None else None
        if ended is not None and self._on_tunnel_end is not None:
            self._on_tunnel_end(*ended)

    def restart_dead(self) -> list[str]:
        """Replace processes that have ended; call this regularly. Return the addresses of the replaced processes."""
        self._listen()
        now = time.monotonic()
        return [address for address, proxy in self._proxies.items() if proxy.restart_if_dead(now)]

    @property
    def saved(self) -> tuple[SavedProxy, ...]:
        """The processes, for another driver."""
        return tuple(proxy.saved for proxy in self._proxies.values())

    def port(self, address: str, server: str) -> int:
        """The port of the proxy at `address`, which is started if there is none. `server`: the endpoint of the driver's server.

        OSError if this machine does not have the address.
        """
        if address not in self._proxies:
            proxy = TcpProxy(address, int(server.rpartition(":")[2]), *self._settings)
            proxy.start()
            self._proxies[address] = proxy
            self._listen()
        return self._proxies[address].port

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.close()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
