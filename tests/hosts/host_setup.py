"""A host of the test network: its properties, and the files that its SSH server reads."""

from __future__ import annotations

import dataclasses
import getpass
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tests.hosts.namespaces import ENVIRONMENT, command

# Gives a host its own host name, files and boot id. $0: its name; $1: its folder; $2: the folders that it hides, one per line;
# then the command.
BOOT = """set -e
hostname "$0"
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id
echo "$2" | while read -r folder; do [ -z "$folder" ] || mount -t tmpfs none "$folder"; done
shift 2
exec "$@"
"""


@dataclasses.dataclass(frozen=True)
class Host:
    """A host with eth0, and with the properties that `Network.add` describes."""

    name: str
    number: int
    namespace: str
    folder: Path
    address: str
    address6: str
    second_address: str = ""
    dead: Literal["", "alone", "shared", "docker"] = ""
    password_only: bool = False
    python: bool = True
    hides: tuple[str, ...] = ()
    sshd: bool = True

    def interfaces(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """The hardware address and the IP addresses of each connected interface."""
        found = {"eth0": (f"02:6e:62:65:00:{self.number:02x}", (self.address, self.address6))}
        if self.second_address:
            found["eth1"] = (f"02:6e:62:65:01:{self.number:02x}", (self.second_address,))
        return found

    def ports(self) -> dict[str, str]:
        """The other end of each interface, in the switch."""
        return {name: f"p{self.number}{name}" for name in self.interfaces()}

    def inside(self) -> list[str]:
        """The words before a command that make it run on this host."""
        if not self.namespace:
            return []
        own = ["unshare", "--uts", "sh", "-c", BOOT, self.name, str(self.folder), "\n".join(self.hides)]
        return ["ip", "netns", "exec", self.namespace, *own]

    def dead_address(self) -> str:
        return {
            "": "",
            "alone": f"172.30.{self.number}.1/24",
            "shared": f"172.29.0.{self.number}/24",
            "docker": "172.17.0.1/16",
        }[self.dead]


def write_host_files(host: Host) -> None:
    """Write the files of a host."""
    host.folder.mkdir()
    (host.folder / "hosts").touch()
    (host.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
    command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host.name, "-f", str(host.folder / "host_key"))
    lines = [
        f"ListenAddress {host.address}",
        f"ListenAddress {host.address6}",
        f"HostKey {host.folder / 'host_key'}",
        f"PidFile {host.folder / 'sshd.pid'}",
        f"AuthorizedKeysFile {host.folder.parent / 'key.pub'}",
        "StrictModes no",
        "UsePAM no",
        "MaxStartups 100",
        "PermitRootLogin yes",
        "KbdInteractiveAuthentication no",
        f"PubkeyAuthentication {'no' if host.password_only else 'yes'}",
        f"PasswordAuthentication {'yes' if host.password_only else 'no'}",
    ]
    if _openssh() >= (9, 8):
        lines.append("PerSourcePenalties no")  # a test that fails to log in must not lock out the next test
    if not host.python:
        programs = host.folder / "bin"
        programs.mkdir()
        for program in [*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()]:
            if not re.match("python|pypy|ipython", program.name) and not (programs / program.name).is_symlink():
                (programs / program.name).symlink_to(program)
        # the login shell's own files may put more on PATH, so it is set after them
        lines.append(f'ForceCommand exec env -i HOME="$HOME" PATH={programs} sh -c "${{SSH_ORIGINAL_COMMAND:-sh}}"')
    (host.folder / "sshd_config").write_text("\n".join(lines) + "\n")


def _openssh() -> tuple[int, int]:
    said = subprocess.run(["ssh", "-V"], env=ENVIRONMENT, capture_output=True, text=True, check=True).stderr
    match = re.search(r"OpenSSH_(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def without_python() -> tuple[str, ...]:
    """The folders of this process's Python that hold nothing else."""
    folders = sorted({os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)})
    own = [folder for folder in folders if folder not in {"/", "/usr", "/usr/local"}]
    return tuple(folder for folder in own if not any(folder.startswith(f"{outer}/") for outer in own))


def write_names(hosts: Sequence[Host], folder: Path) -> None:
    """Write each mounted /etc/hosts in place, and the ssh client's known hosts and configuration."""
    for host in hosts:
        own = f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n"  # as Debian does
        (host.folder / "hosts").write_text(own + "".join(f"{h.address} {h.name}\n" for h in hosts if h is not host))
    keys = {host: (host.folder / "host_key.pub").read_text() for host in hosts}
    (folder / "known_hosts").write_text("".join(f"{h.name},{h.address},{h.address6} {key}" for h, key in keys.items()))
    lines = [
        "Host *",
        f"  User {getpass.getuser()}",
        f"  IdentityFile {folder / 'key'}",
        "  IdentitiesOnly yes",
        f"  UserKnownHostsFile {folder / 'known_hosts'}",
        "  GlobalKnownHostsFile /dev/null",
        "  StrictHostKeyChecking yes",
        "  UpdateHostKeys no",
    ]
    for host in hosts:
        lines += [
            f"Host {host.name}",
            f"  HostName {host.address}",
            f"Host {host.name}v6",
            f"  HostName {host.address6}",
        ]
    (folder / "ssh_config").write_text("\n".join(lines) + "\n")


def write_client(folder: Path) -> None:
    """Write the client's key, and an `ssh` that reads this folder's configuration instead of the user's."""
    command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh", path=ENVIRONMENT["PATH"])} -F {folder / "ssh_config"} "$@"\n'
    )
    wrapper.chmod(0o755)
