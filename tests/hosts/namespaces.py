"""Network namespaces and the processes in them, by the commands of iproute2."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.waiting import until

NEEDS = "needs root, iproute2 (ip), OpenSSH (ssh, sshd, ssh-keygen), unshare, mount and the right to make network namespaces"
NETNS = Path("/run/netns")
DEADLINE = 20.0
ENVIRONMENT = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"}


@functools.cache
def missing() -> str | None:
    """The reason why a test network is impossible here, or None."""
    if os.geteuid() != 0:
        return f"{NEEDS}: not root"
    for program in ("ip", "ssh", "sshd", "ssh-keygen", "unshare", "mount"):
        if not shutil.which(program, path=ENVIRONMENT["PATH"]):
            return f"{NEEDS}: no {program}"
    probe = f"nbe{os.getpid()}-0-probe"
    links = ("one type veth peer name two", "three type bridge")
    try:
        ip("", f"netns add {probe}\n")
        ip(probe, "".join(f"link add name {link}\n" for link in links))
    except OSError as error:
        return f"{NEEDS}: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], env=ENVIRONMENT, capture_output=True, check=False)
    return None


def command(*words: str, feed: str = "") -> str:
    """Run a command and return its output; raise OSError with its stderr."""
    done = subprocess.run(words, input=feed, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}\n{feed}")
    return done.stdout


def ip(namespace: str, lines: str) -> None:
    """Run lines of `ip` commands in a namespace ("": this process's), as one batch."""
    command("ip", *(["-n", namespace] if namespace else []), "-batch", "-", feed=lines)


def processes_in(namespace: str) -> set[int]:
    """Every process in a network namespace, without zombies, which Linux shows in none."""
    assert namespace, "the driver's host is this machine: not all of its processes belong to the test"
    try:
        where = os.stat(NETNS / namespace)
    except FileNotFoundError:  # another run's `sweep` was faster
        return set()
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                there = os.stat(f"/proc/{entry}/ns/net")
            except OSError:  # it has just ended
                continue
            if (there.st_dev, there.st_ino) == (where.st_dev, where.st_ino):
                found.add(int(entry))
    return found


def kill_all(namespace: str, spared: int = 0) -> None:
    """Kill all processes in a namespace, also those that they start meanwhile, except one."""

    def empty() -> bool:
        pids = processes_in(namespace) - {spared}
        for sig in (signal.SIGSTOP, signal.SIGKILL):  # stop all first, so that none reports another one's end
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sig)
        return not pids

    until(empty, DEADLINE, f"all processes of {namespace} to end")


def free_subnets() -> tuple[ipaddress.IPv4Network, ipaddress.IPv4Network, ipaddress.IPv6Network]:
    """Three subnets: one for the hosts, without a route here yet, one for second interfaces, one of IPv6."""
    routes = json.loads(command("ip", "-j", "-4", "route", "show", "table", "all") or "[]")
    taken = [ipaddress.ip_network(route["dst"]) for route in routes if route["dst"] != "default"]
    taken = [there for there in taken if there.prefixlen > 12]  # a wider route gives way to the test network's
    first = os.getpid() * 4  # runs side by side begin their search at different places
    for number in (n % (1 << 14) for n in range(first, first + (1 << 14))):
        x, y = divmod(number, 256)
        subnet = ipaddress.IPv4Network(f"10.{64 + x}.{y}.0/24")
        if not any(subnet.overlaps(there) for there in taken):
            second, subnet6 = f"10.{128 + x}.{y}.0/24", f"fd6e:6265:{number:x}::/64"
            return subnet, ipaddress.IPv4Network(second), ipaddress.IPv6Network(subnet6)
    raise OSError("no subnet of 10.64.0.0/10 is free")


def names(pattern: str) -> Iterator[str]:
    return (path.name for path in NETNS.glob(pattern))


def dismantle(name: str) -> None:
    """End all processes in a network's namespaces; remove its links, then the namespaces."""
    namespaces = sorted(names(f"{name}-*"))
    for namespace in namespaces:
        kill_all(namespace)
    doomed = [f"link del {name}"] if os.path.exists(f"/sys/class/net/{name}") else []
    for line in (*doomed, *(f"netns del {namespace}" for namespace in namespaces)):
        try:
            ip("", f"{line}\n")
        except OSError:
            # two runs may sweep up after a third at once
            if os.path.exists(f"/sys/class/net/{line.split()[-1]}") or (NETNS / line.split()[-1]).exists():
                raise


def sweep() -> None:
    """Remove the namespaces, links and folders that killed test runs have left."""
    folders = Path(tempfile.gettempdir()).glob("nbe*-*-*")
    for name in {*names("nbe*-*-*"), *(folder.name for folder in folders)}:
        match = re.match(r"(nbe(\d+)-\d+)-", name)
        if match and not os.path.exists(f"/proc/{match[2]}"):
            dismantle(match[1])
            shutil.rmtree(Path(tempfile.gettempdir()) / name, ignore_errors=True)
