"""Several machines on one: Linux network namespaces with an address and an OpenSSH server each, which can be cut off, slowed and killed.

    switch namespace:   [ bridge ]--p0--  "driver": this process, an address in the namespace it lives in
                             |  |---p1--  h1: eth0, sshd
                             |------p2--  h2: eth0, sshd       no packet leaves these namespaces

What the hosts have of their own: addresses, routes, loopback, abstract sockets, host name, boot id, /etc/hosts, SSH keys. What they share with this
machine: files, process numbers, clock, processors, memory.
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

DRIVER = "driver"  # the name under which faults speak of this process's own machine

_NOBODY = "02:6e:62:65:ff:ff"  # frames to this address arrive nowhere, and nobody is told
_count = itertools.count()


class Network:
    """`with Network(3) as network:` three machines h1, h2, h3; nothing of them is left afterwards."""

    def __init__(self, hosts: int = 3) -> None:
        self.first = tuple(f"h{number}" for number in range(1, hosts + 1))
        self.hosts: dict[str, Host]
        self._cut: set[str]
        self._deaf: set[tuple[str, str]]  # (a, b): what a sends to b vanishes
        self._slow: dict[str, list[int]]  # host -> its relays
        self._told: dict[str, set[str]]  # what each namespace was told about its neighbours
        self._new: dict[str, str]  # host -> its interfaces and their addresses as it was started

    def __enter__(self) -> Self:
        sweep()
        self.hosts, self._cut, self._deaf, self._slow, self._told = {}, set(), set(), {}, {}
        self.name = f"nbe{os.getpid()}-{next(_count)}"
        self.switch = f"{self.name}-switch"
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        try:
            self._build()
            self.add(*self.first)
            self._new = {name: self._addresses(name) for name in self.first}
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
        """A folder for the front of PATH: its `ssh` knows the hosts' names and keys, and asks nothing."""
        return str(self.folder / "bin")

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    def _build(self) -> None:
        """The switch, this process's place at it, the client's key."""
        self._subnet, self._second, self._subnet6 = free_subnets()
        # sshd locks its unprivileged part up in this folder; a service would have made it
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
        """What brings a host's connected interfaces up, for `ip -batch`."""
        lines = ""
        for interface, (_, addresses) in host.interfaces().items():
            device = eth0 if interface == "eth0" else interface
            for address in addresses:
                tail = "/64 nodad" if ":" in address else "/24"
                lines += f"addr add {address}{tail} dev {device}\n"
            lines += f"link set {device} up\n"
        return lines

    def add(self, *names: str, **kind: Any) -> tuple[Host, ...]:
        """More machines, which start side by side. Of what kind:

        - `dead="alone"`: it also has an interface `dead0`, listed first, that is up and connected to nothing, with an address in a subnet of
          its own; `"shared"`: all such hosts claim to be in one subnet there; `"docker"`: each is 172.17.0.1 there.
        - `second=True`: eth1 works as well; it and the others of this kind meet there in a second subnet, without the driver.
        - `password_only=True`: its sshd takes no keys. `sshd=False`: nothing listens, connections are refused (and after `cut`: vanish).
        - `python=False`: neither PATH nor the place of this process's Python has a Python there.
        - `hides=("/folder", ...)`: there these folders, which hosts otherwise share, are empty and its own.
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
            host_setup.furnish(host)
        self._tell()
        self._boot(hosts)
        return tuple(hosts)

    def remove(self, *names: str) -> None:
        """Remove hosts that `add` started, with all that runs on them."""
        self.heal(*names)
        for name in names:
            host = self.hosts.pop(name)
            kill_all(host.namespace)
            # the kernel removes the cables of a deleted namespace at its leisure; the next host's have the same names
            cables = [*host.ports().values(), *([f"dead{host.number}"] if host.dead else [])]
            ip(self.switch, "".join(f"link del {cable}\n" for cable in cables))
            ip("", f"netns del {host.namespace}\n")
            self._told.pop(name, None)
            shutil.rmtree(host.folder)
        self._tell()

    def restore(self) -> None:
        """Make this network as it was when it was new; build it again if a test has changed the inside of one of its first hosts."""
        self.heal()
        self.remove(*(name for name in self.hosts if name not in {DRIVER, *self.first}))
        for name in self.first:
            kill_all(self.hosts[name].namespace, self._server(name))
        if self._new != {name: self._addresses(name) for name in self.first} or not all(map(self._server, self.first)):
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
        """What runs on a host beside its SSH server."""
        return self.processes(host) - {self._server(host)}

    def _tell(self) -> None:
        """Bring everyone's list of neighbours up to date.

        The lists are fixed: no ARP can fail, so what is cut off is silent, and never "no route to host".
        """
        for host in self.hosts.values():
            wanted = set()
            for other in self.hosts.values():
                deaf = (host.name, other.name) in self._deaf
                for interface, (mac, addresses) in other.interfaces().items() if other is not host else ():
                    device = self.name if host.name == DRIVER else interface
                    if interface in host.interfaces():
                        mac_told = _NOBODY if deaf else mac
                        wanted |= {f"{a} lladdr {mac_told} dev {device} nud permanent" for a in addresses}
            news = wanted - self._told.get(host.name, set())
            if news:
                ip(host.namespace, "".join(f"neigh replace {line}\n" for line in sorted(news)))
            self._told[host.name] = wanted
        host_setup.write_names([host for host in self.hosts.values() if host.name != DRIVER], self.folder)

    def _boot(self, hosts: Sequence[Host]) -> None:
        """Start the SSH servers. They are daemons, so they are nobody's children: what a test counts as started by itself are not they."""
        waiting = [host for host in hosts if host.sshd]
        daemon = shutil.which("sshd", path=ENVIRONMENT["PATH"])  # it starts itself again, and wants to know where it is
        for host in waiting:
            (host.folder / "sshd.pid").unlink(missing_ok=True)
            files = ["-f", str(host.folder / "sshd_config"), "-E", str(host.folder / "sshd.log")]
            self.run(host.name, str(daemon), *files)
        for host in waiting:  # the file is written when it listens
            file = host.folder / "sshd.pid"
            until(file.exists, DEADLINE, f"{file}; see sshd.log beside it")

    def run(self, host: str, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, not through SSH; its output as text. An exit code other than 0 is an error, unless `check=False`."""
        options = {"check": True, "capture_output": True, "text": True, "env": ENVIRONMENT, "timeout": 60, **options}
        return subprocess.run([*self.inside(host), *command], **options)  # noqa: PLW1510 - in the options

    def inside(self, host: str) -> list[str]:
        """What to put before a command, for Popen, to have it run on a host."""
        return self.hosts[host].inside()

    def socket(self, host: str, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """A socket of a host, in the hands of this process: it binds and connects there."""
        namespace = self.hosts[host].namespace

        def there() -> socket.socket:
            # a thread can change its namespace, and a socket stays in the one where it was made
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
        """From now on all packets from and to these hosts vanish; no connection is told."""
        for host in hosts:
            self._cut.add(host)
            self._plug(host)

    def cut_between(self, a: str, b: str, *, one_way: bool = False) -> None:
        """From now on all packets from a to b vanish, and unless one_way those from b to a."""
        self._deaf |= {(a, b)} if one_way else {(a, b), (b, a)}
        self._tell()

    def slow(self, *hosts: str, delay: float = 0.2, loss: float = 0.0, seed: int = 0) -> None:
        """From now on packets from and to these hosts need half the delay (seconds; so an answer comes after all of it), or get lost.

        loss is the probability for each frame; a frame can be up to 64 KiB of a stream. Two slow hosts are twice as far from each other.
        """
        relay = str(Path(__file__).with_name("relay.py"))
        for host in hosts:
            self._hurry(host)
            relays = []
            for port in self.hosts[host].ports().values():
                near, far = f"{port}n", f"{port}f"
                ip(self.switch, f"link add name {near} up type veth peer name {far}\nlink set {far} up\n")
                wire = [sys.executable, relay, port, near, str(delay / 2), str(loss), str(seed)]
                relays.append(int(command("ip", "netns", "exec", self.switch, *wire)))  # returns when the relay works
            self._slow[host] = relays
            self._plug(host)

    def _hurry(self, host: str) -> None:
        """Take the relays out of the way; the cables end nowhere then."""
        relays = self._slow.pop(host, [])
        for pid in relays:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not processes_in(self.switch) & set(relays), DEADLINE, f"relays {relays} to end")
        if relays:
            ip(self.switch, "".join(f"link del {port}n\n" for port in self.hosts[host].ports().values()))

    def _plug(self, host: str) -> None:
        """Into the switch goes the end of each cable, the relay's if there is one, and none while the host is cut off.

        It is pulled out here, so that the host's own end stays up.
        """
        lines = ""
        for port in self.hosts[host].ports().values():
            ends = [port, f"{port}f"] if host in self._slow else [port]
            for end in ends:
                plugged = end is ends[-1] and host not in self._cut
                lines += f"link set {end} {'master bridge' if plugged else 'nomaster'}\n"
        ip(self.switch, lines)

    def heal(self, *hosts: str) -> None:
        """The network of these hosts, or of all, works again: what `cut`, `cut_between` and `slow` did is undone."""
        chosen = set(hosts or self.hosts)
        ill = chosen & (self._cut | set(self._slow))
        self._cut -= chosen
        for host in ill:
            self._hurry(host)
            self._plug(host)
        self._deaf = {pair for pair in self._deaf if not chosen & set(pair)}
        self._tell()

    def kill(self, *hosts: str) -> None:
        """Kill every process on these hosts, sshd too. Their kernel lives on and closes the connections: the others notice."""
        for host in hosts:
            kill_all(self.hosts[host].namespace)

    def power_off(self, *hosts: str) -> None:
        """These hosts are gone between two packets: nobody is told."""
        self.cut(*hosts)
        self.kill(*hosts)

    def reboot(self, *hosts: str) -> None:
        """Whatever still runs on these hosts is killed; their network works, and sshd runs again."""
        self.kill(*hosts)
        self.heal(*hosts)
        self._boot([self.hosts[host] for host in hosts])
