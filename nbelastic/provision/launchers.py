"""Start and stop an agent on a host: here as a process, elsewhere through ssh or by a batch system."""

from __future__ import annotations

import asyncio
import fcntl
import getpass
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from subprocess import STDOUT, Popen
from typing import IO, Any, Protocol

import psutil

from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.settings import SSH, Settings
from nbelastic.provision import ssh
from nbelastic.system.addresses import is_loopback
from nbelastic.system.folder_paths import batch_folder
from nbelastic.system.interfaces import address_towards
from nbelastic.system.process_identity import identity, is_alive, pid_of, pidfd_of
from nbelastic.system.processes import kill_group, last_output


class Agent(Protocol):
    """An agent's process, as the driver holds it. `on_stop(why)` is called in the loop's thread, once.

    `process`: which one of this machine it is, or has before it (`pid@start`); empty: none. `job`: that of a batch system.
    """

    @property
    def process(self) -> str: ...

    @property
    def job(self) -> str: ...

    def start(self, config: Mapping[str, Any]) -> None:
        """Returns at once."""

    def kill(self) -> None:
        """At once; its workers die with it."""


PIPE_BUFFER = 1 << 16  # bytes that a pipe of Linux takes before somebody reads; a user may have up to 1 MiB


def _endless() -> IO[bytes]:
    """A pipe whose reader is its writer too: it never comes to its end as long as that lives."""
    reader, writer = os.pipe()
    try:
        return os.fdopen(os.open(f"/proc/self/fd/{reader}", os.O_RDWR | os.O_CLOEXEC), "r+b", buffering=0)
    finally:
        os.close(reader)
        os.close(writer)


class ProcessAgent:
    """An agent behind a process of this machine: itself, or the ssh client in front of it."""

    job = ""

    def __init__(
        self,
        command: list[str],
        log: Path,
        explain: Callable[[int | None, str], str],
        on_stop: Callable[[str], None],
    ) -> None:
        self._command, self._log, self._explain, self._on_stop = command, log, explain, on_stop
        self.process = ""

    def start(self, config: Mapping[str, Any]) -> None:
        self._begin = self._log.stat().st_size if self._log.exists() else 0
        said = json.dumps(config).encode() + b"\n"
        with open(self._log, "ab") as out, _endless() as stdin:
            if len(said) > PIPE_BUFFER:  # nobody reads it yet
                fcntl.fcntl(stdin, fcntl.F_SETPIPE_SZ, len(said))
            stdin.write(said)  # first: an agent whose driver has been killed would wait for it for ever
            self._child = Popen(self._command, stdin=stdin, stdout=out, stderr=STDOUT, start_new_session=True)
        self.process = identity(self._child.pid)
        self._watched = os.pidfd_open(self._child.pid)
        asyncio.get_running_loop().add_reader(self._watched, self._ended)

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._watched)
        os.close(self._watched)
        code = self._child.wait()
        self._on_stop(self._explain(code, last_output(self._log, self._begin)))

    def kill(self) -> None:
        if self._child.returncode is None:  # nobody else has its number before its exit is taken
            kill_group(self._child.pid)


class AdoptedAgent:
    """An agent that another driver has started: behind this process (`pid@start`) of this machine, if it has one."""

    job = ""

    def __init__(self, process: str, on_stop: Callable[[str], None]) -> None:
        self.process, self._on_stop = process, on_stop
        self._pid = pid_of(process)

    def start(self, config: Mapping[str, Any]) -> None:  # noqa: ARG002  (the other driver has told it)
        if not self.process:  # a job that was about to be submitted: only the link tells of it
            return
        loop = asyncio.get_running_loop()
        try:
            self._watched = pidfd_of(self.process)
        except OSError:
            loop.call_soon(self._on_stop, "its process was gone")
            return
        loop.add_reader(self._watched, self._ended)

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._watched)
        os.close(self._watched)
        self._on_stop("its process has ended")

    def kill(self) -> None:
        if is_alive(self.process):
            kill_group(self._pid)


class BatchJobAgent:
    """An agent behind a job of a batch system. `number`: which one of the cluster's agents it is."""

    process = ""

    def __init__(self, host: str, settings: Settings, on_stop: Callable[[str], None], number: int) -> None:
        from nbelastic.provision.batch import BatchAgent  # it imports ipyparallel, which takes its time

        self._python, self._on_stop = settings.python, on_stop
        folder = batch_folder(settings.name, settings.number)
        self._batch = BatchAgent(
            settings.launcher, host, folder, settings.launcher_options, self._stopped, number=number
        )

    @property
    def job(self) -> str:
        return self._batch.job

    def start(self, config: Mapping[str, Any]) -> None:
        self._batch.start(config, {}, self._python, None)

    def adopt(self, job: str) -> None:
        """Instead of `start`: another driver has submitted it."""
        self._batch.adopt(job)

    def _stopped(self, code: int | None) -> None:
        self._on_stop(_ended("batch job", code, self._batch.output()))

    def kill(self) -> None:
        self._batch.kill()

    async def state(self) -> str:
        """How the job stands, in a word or two."""
        return await self._batch.state()


def agent_for(spec: HostSpec, local: str, settings: Settings, on_stop: Callable[[str], None], number: int) -> Agent:
    """What will start the agent of this host, the cluster's `number`-th."""
    stem = "".join(c if c.isalnum() or c in ".-_" else "_" for c in spec.name)
    log, python = settings.run_folder / f"agent-{stem}.log", settings.python
    if local:
        return ProcessAgent([sys.executable, "-c", ssh.AGENT], log, partial(_ended, "agent"), on_stop)
    if settings.launcher != SSH:
        return BatchJobAgent(spec.name, settings, on_stop, number)
    return ProcessAgent(
        ssh.command(spec, python), log, lambda code, said: ssh.explain(spec, code, said, python), on_stop
    )


def _ended(what: str, code: int | None, said: str) -> str:
    """Why, in one line. `said`: what came out of it."""
    last = "; ".join(said.strip().splitlines()[-5:])
    return f"its {what} ended with exit code {code}" + (f": {last}" if code and last else "")


async def locate(spec: HostSpec, launcher: str) -> tuple[str, str]:
    """Where the host is: its loopback address if it is this machine, and this machine's address towards it if not.

    One of the two is empty. A batch system chooses the machine itself, whatever the host is called here.
    """
    if launcher != SSH and not spec.name.startswith(("localhost", "127.")):
        return "", outgoing("")
    if not spec.user or spec.user == getpass.getuser():
        local = own(await _addresses(spec.name))
        if local:
            return local, ""
    found = await _addresses(await ssh.real_name(spec))
    return "", outgoing(found[0] if found else "")


async def here_towards(spec: HostSpec) -> str:
    """The address of this machine towards a host that ssh knows; empty: it is this one. OSError if there is no way."""
    found = await _addresses(spec.name) or await _addresses(await ssh.real_name(spec))
    if not found:
        raise OSError(f"{spec.name} is an unknown name: check it, or give the address")
    if own(found):
        return ""
    here = outgoing(found[0])
    if is_loopback(here):
        raise OSError(f"there is no way from here to {spec.name} ({found[0]})")
    return here


def own(found: list[str]) -> str:
    """Which of these addresses is this machine's, loopback ones first; empty if none is."""
    loopback = sorted(filter(is_loopback, found))
    if loopback:
        return loopback[0]
    mine = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    return "127.0.0.1" if mine.intersection(found) else ""


def outgoing(target: str) -> str:
    """Which address of this machine is towards `target`; for an unknown one (behind a jump host) towards the world."""
    target = target or "198.51.100.1"  # nobody has this one (RFC 5737), and nothing is sent
    try:
        return address_towards(target)
    except OSError:
        return "127.0.0.1"  # ssh will say why


async def _addresses(name: str) -> list[str]:
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(info[4][0]) for info in infos]
