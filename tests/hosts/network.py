"""Several hosts on one machine: network namespaces with an address and an OpenSSH server each.

Tests can cut these hosts off, slow them and kill them.

    switch namespace:   [ bridge ]--p0--  "driver": this process, with an address in its own namespace
                             |  |---p1--  h1: eth0, sshd
                             |------p2--  h2: eth0, sshd       no packet leaves these namespaces

Each host has its own addresses, routes, loopback, abstract sockets, host name, boot id, /etc/hosts and SSH keys. All hosts share
files, process numbers, clock, processors and memory with this machine.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from tests.hosts import host_setup
from tests.hosts.host_setup import Host
from tests.hosts.namespaces import (
    DEADLINE,
    ENVIRONMENT,
    NEEDS,
    NETNS,
    command,
    dismantle,
    free_subnets,
    ip,
    kill_all,
    missing,
    processes_in,
    sweep,
)
from tests.support.waiting import until

__all__ = ["DRIVER", "NEEDS", "Host", "Network", "missing"]

DRIVER = "driver"  # the name of this process's host, for `cut` and the other faults

_UNUSED_MAC = "02:6e:62:65:ff:ff"  # frames to this hardware address vanish without an error
_count = itertools.count()


class Network:
    """`with Network(3) as network:` starts the hosts h1, h2 and h3, and removes them afterwards."""

    def __init__(self, hosts: int = 3) -> None:
        self.first = tuple(f"h{number}" for number in range(1, hosts + 1))
        self.hosts: dict[str, Host]
        self._cut: set[str]
        self._cut_pairs: set[tuple[str, str]]  # (a, b): packets from a to b vanish
        self._slow: dict[str, list[int]]  # host -> its relays
        self._walled: set[str]  # hosts that can only answer ssh of the driver's host
        self._neighbours: dict[str, set[str]]  # host -> the neighbour entries that its namespace has
        self._fresh_addresses: dict[str, str]  # host -> its interfaces and addresses at its start

    def __enter__(self) -> Self:
        sweep()
        self.hosts, self._cut, self._cut_pairs, self._slow, self._neighbours = {}, set(), set(), {}, {}
        self._walled = set()
        self.name = f"nbe{os.getpid()}-{next(_count)}"
        self.switch = f"{self.name}-switch"
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        try:
            self._build()
            self.add(*self.first)
            self._fresh_addresses = {name: self._addresses(name) for name in self.first}
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        dismantle(self.name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, host: str) -> Host:
        return self.hosts[host]

    @property
    def path(self) -> str:
        """A folder for the front of PATH, with an `ssh` that has the hosts' names and keys."""
        return str(self.folder / "bin")

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    def _build(self) -> None:
        """Make the switch, this process's interface on it, and the client's key."""
        self._subnet, self._second, self._subnet6 = free_subnets()
        # sshd needs this folder, which its system service would make
        Path("/run/sshd").mkdir(exist_ok=True)
        host_setup.write_client(self.folder)
        ip("", f"netns add {self.switch}\n")
        for which in ("all", "default"):  # a switch has no addresses
            file = f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6"
            command("ip", "netns", "exec", self.switch, "sh", "-c", f"echo 1 > {file}")
        ip(self.switch, "link add name bridge type bridge stp_state 0 mcast_snooping 0\nlink set bridge up\n")
        driver = self._host(DRIVER, {"sshd": False, "namespace": ""})
        self.hosts[DRIVER] = driver
        port, mac = driver.ports()["eth0"], driver.interfaces()["eth0"][0]
        ip("", f"link add name {self.name} address {mac} type veth peer name {port} netns {self.switch}\n")
        ip("", self._up(driver, self.name))
        ip(self.switch, f"link set {port} master bridge up\n")

    def _host(self, name: str, kind: dict[str, Any]) -> Host:
        number = 1 + max((host.number for host in self.hosts.values()), default=0)
        hides = (*kind.pop("hides", ()), *(() if kind.get("python", True) else host_setup.without_python()))
        second = str(self._second[number]) if kind.pop("second", False) else ""
        return Host(
            **{"namespace": f"{self.name}-{name}", **kind},
            name=name,
            number=number,
            folder=self.folder / name,
            address=str(self._subnet[number]),
            address6=str(self._subnet6[number]),
            second_address=second,
            hides=tuple(hides),
        )

    @staticmethod
    def _up(host: Host, eth0: str = "eth0") -> str:
        """The lines for `ip -batch` that bring a host's connected interfaces up."""
        lines = ""
        for interface, (_, addresses) in host.interfaces().items():
            device = eth0 if interface == "eth0" else interface
            for address in addresses:
                tail = "/64 nodad" if ":" in address else "/24"
                lines += f"addr add {address}{tail} dev {device}\n"
            lines += f"link set {device} up\n"
        return lines

    def add(self, *names: str, **kind: Any) -> tuple[Host, ...]:
        """Start more hosts at the same time. Options:

        - `dead`: an interface `dead0`, listed first, is up but not connected. `"alone"`: its subnet has no other host;
          `"shared"`: all such hosts have addresses in one subnet; `"docker"`: each has the address 172.17.0.1.
        - `second=True`: eth1 connects such hosts in a second subnet, without the driver.
        - `password_only=True`: its sshd accepts no keys. `sshd=False`: nothing listens, so connections are refused.
        - `python=False`: the host has no Python, neither on PATH nor in the folder of this process's Python.
        - `hides=("/folder", ...)`: these folders are empty on the host, and not shared.
        """
        hosts = []
        for name in names:
            host = self._host(name, dict(kind))
            self.hosts[name] = host
            hosts.append(host)
        ip("", "".join(f"netns add {host.namespace}\n" for host in hosts))
        links = ""
        for host in hosts:
            if host.dead:
                links += f"link add name dead{host.number} type veth peer name dead0 netns {host.namespace}\n"
                links += f"link set dead{host.number} up\n"
            for interface, (mac, _) in host.interfaces().items():
                port = host.ports()[interface]
                links += f"link add name {port} type veth peer name {interface} address {mac} netns {host.namespace}\n"
                links += f"link set {port} master bridge up\n"
        ip(self.switch, links)
        for host in hosts:
            dead = f"addr add {host.dead_address()} dev dead0\nlink set dead0 up\n" if host.dead else ""
            ip(host.namespace, f"link set lo up\n{dead}{self._up(host)}")
            host_setup.write_host_files(host)
        self._update_neighbours()
        self._start_ssh_servers(hosts)
        return tuple(hosts)

    def remove(self, *names: str) -> None:
        """Remove hosts that `add` started, with all their processes."""
        self.heal(*names)
        for name in names:
            host = self.hosts.pop(name)
            kill_all(host.namespace)
            # Linux removes the cables of a deleted namespace later, and the next host's cables have the same names
            cables = [*host.ports().values(), *([f"dead{host.number}"] if host.dead else [])]
            ip(self.switch, "".join(f"link del {cable}\n" for cable in cables))
            ip("", f"netns del {host.namespace}\n")
            self._neighbours.pop(name, None)
            shutil.rmtree(host.folder)
        self._update_neighbours()

    def restore(self) -> None:
        """Undo all changes; build the network again if a test has changed addresses or the sshd of one of its first hosts."""
        self.heal()
        self.remove(*(name for name in self.hosts if name not in {DRIVER, *self.first}))
        for name in self.first:
            kill_all(self.hosts[name].namespace, self._server(name))
        if self._fresh_addresses != {name: self._addresses(name) for name in self.first} or not all(
            map(self._server, self.first)
        ):
            self.__exit__()
            self.__enter__()

    def _addresses(self, host: str) -> str:
        return command("ip", "-n", self.hosts[host].namespace, "-br", "address")

    def _server(self, host: str) -> int:
        """The process of a host's SSH server, 0 if there is none."""
        file = self.hosts[host].folder / "sshd.pid"
        server = int(file.read_text()) if file.exists() else 0
        return server if server in self.processes(host) else 0

    def strays(self, host: str) -> set[int]:
        """The processes on a host other than its SSH server."""
        return self.processes(host) - {self._server(host)}

    def _update_neighbours(self) -> None:
        """Update the list of neighbours of each host.

        The entries are permanent: ARP cannot fail, so a host that is cut off gives no error such as "no route to host".
        """
        for host in self.hosts.values():
            wanted = set()
            for other in self.hosts.values():
                is_cut = (host.name, other.name) in self._cut_pairs
                for interface, (mac, addresses) in other.interfaces().items() if other is not host else ():
                    device = self.name if host.name == DRIVER else interface
                    if interface in host.interfaces():
                        lladdr = _UNUSED_MAC if is_cut else mac
                        wanted |= {f"{a} lladdr {lladdr} dev {device} nud permanent" for a in addresses}
            changes = wanted - self._neighbours.get(host.name, set())
            if changes:
                ip(host.namespace, "".join(f"neigh replace {line}\n" for line in sorted(changes)))
            self._neighbours[host.name] = wanted
        host_setup.write_names([host for host in self.hosts.values() if host.name != DRIVER], self.folder)

    def _start_ssh_servers(self, hosts: Sequence[Host]) -> None:
        """Start the SSH servers as daemons, so that a test does not count them among its children."""
        waiting = [host for host in hosts if host.sshd]
        daemon = shutil.which("sshd", path=ENVIRONMENT["PATH"])  # it starts itself again, and so needs its full path
        for host in waiting:
            (host.folder / "sshd.pid").unlink(missing_ok=True)
            files = ["-f", str(host.folder / "sshd_config"), "-E", str(host.folder / "sshd.log")]
            self.run(host.name, str(daemon), *files)
        for host in waiting:  # sshd writes this file when it listens
            file = host.folder / "sshd.pid"
            until(file.exists, DEADLINE, f"{file}; see sshd.log beside it")

    def run(self, host: str, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, without SSH. Its output is text; an exit code other than 0 raises unless `check=False`."""
        options = {"check": True, "capture_output": True, "text": True, "env": ENVIRONMENT, "timeout": 60, **options}
        return subprocess.run([*self.inside(host), *command], **options)  # noqa: PLW1510 - in the options

    def inside(self, host: str) -> list[str]:
        """The words before a command, for Popen, that make it run on a host."""
        return self.hosts[host].inside()

    def socket(self, host: str, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """A socket that this process uses, and that binds and connects on a host."""
        namespace = self.hosts[host].namespace

        def there() -> socket.socket:
            # a thread can change its namespace, and a socket stays in the namespace where it was made
            if namespace:
                with open(NETNS / namespace) as file:
                    if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                        raise OSError(ctypes.get_errno(), f"setns {namespace}")
            return socket.socket(family, kind)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(there).result()

    def processes(self, host: str) -> set[int]:
        """The processes on a host, its sshd among them."""
        return processes_in(self.hosts[host].namespace)

    def cut(self, *hosts: str) -> None:
        """From now on all packets from and to these hosts vanish, without an error on any connection."""
        for host in hosts:
            self._cut.add(host)
            self._connect_cables(host)

    def cut_between(self, a: str, b: str, *, one_way: bool = False) -> None:
        """From now on all packets from a to b vanish, and without `one_way` also the packets from b to a."""
        self._cut_pairs |= {(a, b)} if one_way else {(a, b), (b, a)}
        self._update_neighbours()

    def wall(self, *hosts: str) -> None:
        """From now on packets from these hosts to the driver's host vanish, except those of their SSH servers."""
        for host in hosts:
            self._walled.add(host)
            self._set_wall(host, "add")

    def _set_wall(self, host: str, how: str) -> None:
        driver = self.hosts[DRIVER]
        for family, address in (("-4", driver.address), ("-6", driver.address6)):
            for rule in (f"pref 10 to {address} ipproto tcp sport 22 lookup main", f"pref 11 to {address} blackhole"):
                command("ip", "-n", self.hosts[host].namespace, family, "rule", how, *rule.split())

    def slow(self, *hosts: str, delay: float = 0.2, loss: float = 0.0, seed: int = 0) -> None:
        """From now on delay packets from and to these hosts, and lose some.

        A packet needs half of `delay` (seconds), so an answer needs all of it, and twice that between two slow hosts. `loss` is
        the probability for each frame, which can be up to 64 KiB of a stream.
        """
        relay = str(Path(__file__).with_name("lossy_link.py"))
        for host in hosts:
            self._end_relays(host)
            relays = []
            for port in self.hosts[host].ports().values():
                near, far = f"{port}n", f"{port}f"
                ip(self.switch, f"link add name {near} up type veth peer name {far}\nlink set {far} up\n")
                wire = [sys.executable, relay, port, near, str(delay / 2), str(loss), str(seed)]
                relays.append(int(command("ip", "netns", "exec", self.switch, *wire)))  # returns when the relay works
            self._slow[host] = relays
            self._connect_cables(host)

    def _end_relays(self, host: str) -> None:
        """End the relays of a host; its cables are not connected afterwards."""
        relays = self._slow.pop(host, [])
        for pid in relays:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not processes_in(self.switch) & set(relays), DEADLINE, f"relays {relays} to end")
        if relays:
            ip(self.switch, "".join(f"link del {port}n\n" for port in self.hosts[host].ports().values()))

    def _connect_cables(self, host: str) -> None:
        """Connect each cable, or its relay, to the switch, unless the host is cut off.

        A cut removes the cable here, so that the host's end stays up.
        """
        lines = ""
        for port in self.hosts[host].ports().values():
            ends = [port, f"{port}f"] if host in self._slow else [port]
            for end in ends:
                plugged = end is ends[-1] and host not in self._cut
                lines += f"link set {end} {'master bridge' if plugged else 'nomaster'}\n"
        ip(self.switch, lines)

    def heal(self, *hosts: str) -> None:
        """Undo `cut`, `cut_between`, `slow` and `wall` for these hosts, or for all."""
        chosen = set(hosts or self.hosts)
        for host in chosen & self._walled:
            self._set_wall(host, "del")
        self._walled -= chosen
        changed = chosen & (self._cut | set(self._slow))
        self._cut -= chosen
        for host in changed:
            self._end_relays(host)
            self._connect_cables(host)
        self._cut_pairs = {pair for pair in self._cut_pairs if not chosen & set(pair)}
        self._update_neighbours()

    def kill(self, *hosts: str) -> None:
        """Kill every process on these hosts, with sshd. Linux closes their connections, so the other ends notice."""
        for host in hosts:
            kill_all(self.hosts[host].namespace)

    def power_off(self, *hosts: str) -> None:
        """Cut these hosts off and kill all their processes, so that no other host gets a notice."""
        self.cut(*hosts)
        self.kill(*hosts)

    def reboot(self, *hosts: str) -> None:
        """Kill all processes on these hosts, make their network work again, and start sshd."""
        self.kill(*hosts)
        self.heal(*hosts)
        self._start_ssh_servers([self.hosts[host] for host in hosts])
