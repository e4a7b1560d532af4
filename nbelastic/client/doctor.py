"""Examines hosts before, or while, a cluster uses them: ssh, versions, GPUs, open files, and the network between them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Literal, NamedTuple, TypeVar

import msgspec

from nbelastic.client.waiting import wait_for_result
from nbelastic.protocol.host_facts import MARK, HostFacts, Reached, Target
from nbelastic.protocol.host_parsing import parse_host
from nbelastic.protocol.host_texts import cleaned
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.settings import SSH
from nbelastic.provision import ssh
from nbelastic.provision.host_location import locate
from nbelastic.system import open_files, versions
from nbelastic.system.processes import kill_group

T = TypeVar("T")
HERE = "this machine"
CODE = "from nbelastic.agent.host_facts import main; main()"
FACTS_TIMEOUT = 60.0  # seconds for ssh, the start of Python, and NVML
REACH_TIMEOUT = 30.0  # seconds for all connections of a host
LONGEST_LINE = 1 << 20
FEW_FILES = 4096  # a limit of open files that is enough for about 600 workers


class Finding(NamedTuple):
    """One line about a host. `state`: ok; `warning`: it may be a problem; `wrong`: it is one, and the text says what to do."""

    host: str
    state: Literal["ok", "warning", "wrong"]
    text: str


class Examined(NamedTuple):
    """A host: its facts and what it has reached, or why there are none."""

    facts: HostFacts | None = None
    reached: Sequence[Reached] = ()
    problem: str = ""


def examine(hosts: Sequence[str], python: str | None = None) -> list[Finding]:
    """Examine these hosts (`name` or `user@name`) and this machine, all at once. UsageError for a wrong name."""
    specs = [parse_host(host, 1) for host in hosts]
    begun: Future[Callable[[], object]] = Future()
    with ThreadPoolExecutor(1) as thread:  # a notebook's thread has an event loop already
        found: Future[Mapping[str, Examined]] = thread.submit(asyncio.run, _cancellable(_examine(specs, python), begun))
        try:
            return findings(wait_for_result(found, None, lambda: "the hosts"))
        except KeyboardInterrupt:
            begun.result()()
            raise


async def _cancellable(work: Awaitable[T], begun: Future[Callable[[], object]]) -> T:
    """Do the work; `begun` gets a function that cancels it, for another thread."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    begun.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
    return await work


async def _examine(specs: Sequence[HostSpec], python: str | None) -> Mapping[str, Examined]:
    places = await asyncio.gather(*(locate(spec, SSH) for spec in specs))
    remote = {spec.name: spec for spec, (local, _) in zip(specs, places, strict=True) if not local}
    hosts = [_Host(HERE, None, python), *(_Host(name, spec, python) for name, spec in remote.items())]
    try:
        await asyncio.gather(*(host.start() for host in hosts))
        targets = [target for host in hosts for target in host.targets()]
        await asyncio.gather(*(host.reach([one for one in targets if one.host != host.name]) for host in hosts))
    finally:
        for host in hosts:
            host.end()
        await asyncio.gather(*(host.ended() for host in hosts))
    return {host.name: Examined(host.facts, host.reached, host.problem) for host in hosts}


class _Host:
    """A process of `agent/host_facts.py` on a host; on this machine without `spec`."""

    def __init__(self, name: str, spec: HostSpec | None, python: str | None) -> None:
        self.name, self._spec, self._python = name, spec, python
        self.facts: HostFacts | None = None
        self.reached: Sequence[Reached] = ()
        self.problem = ""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, and read its facts."""
        spec, pipe = self._spec, asyncio.subprocess.PIPE
        command = [sys.executable, "-P", "-c", CODE] if spec is None else ssh.command(spec, self._python, CODE)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, limit=LONGEST_LINE, start_new_session=True
            )
        except OSError as error:
            self.problem = f"{command[0]} cannot be started here: {error.strerror}"
            return
        try:
            async with asyncio.timeout(FACTS_TIMEOUT):
                line = await self._answer()
                if line is None:
                    self.problem = await self._explain_end()
                    return
            self.facts = cleaned(msgspec.json.decode(line, type=HostFacts))
        except TimeoutError:
            self.problem = f"it has not answered for {FACTS_TIMEOUT:g} s: try `ssh {self.name}` in a terminal"
        except (msgspec.DecodeError, ValueError):
            self.problem = "its nbelastic gives another answer: install the same version there"

    def targets(self) -> list[Target]:
        """All addresses at which other hosts are to connect to this one."""
        facts = self.facts
        if facts is None:
            return []
        return [Target(self.name, address, port, facts.token) for address, port in facts.ports.items()]

    async def reach(self, targets: Sequence[Target]) -> None:
        """Have it connect to these targets."""
        if self.facts is None or self._process is None or self._process.stdin is None:
            return
        try:
            async with asyncio.timeout(REACH_TIMEOUT):
                self._process.stdin.write(msgspec.json.encode(targets) + b"\n")
                await self._process.stdin.drain()
                reached = msgspec.json.decode(await self._answer() or b"[]", type=list[Reached])
            self.reached = [cleaned(one) for one in reached]
        except (TimeoutError, OSError, ValueError):
            self.problem = "it did not tell which hosts it reaches: it has ended, or its network is very slow"

    async def _answer(self) -> bytes | None:
        """The next answer; None if the process has closed its output. ValueError for a line that is too long."""
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.startswith(MARK.encode()):
                return line.removeprefix(MARK.encode())
        return None

    async def _explain_end(self) -> str:
        assert self._process is not None
        assert self._process.stderr is not None
        output = (await self._process.stderr.read(LONGEST_LINE)).decode(errors="replace")
        code = await self._process.wait()
        if self._spec is None:
            return f"Python cannot run nbelastic here: {output.strip().splitlines()[-1] if output.strip() else code}"
        if "nbelastic.agent.host_facts" in output:
            return f"its nbelastic is older: install {versions.nbelastic_version()} there"
        return ssh.explain_exit(self._spec, code, output, self._python)

    def end(self) -> None:
        """End the process: its input ends, and so does ssh."""
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)

    async def ended(self) -> None:
        if self._process is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.communicate(), 5.0)


def findings(examined: Mapping[str, Examined]) -> list[Finding]:
    """Judge what is known of the hosts. The first line of each host that answers says what it has."""
    found: list[Finding] = []
    here = examined[HERE].facts
    for name, host in examined.items():
        facts = host.facts
        if facts is None:
            found.append(Finding(name, "wrong", f"{host.problem}."))
            continue
        found.append(Finding(name, "ok", _describe(facts)))
        found += [Finding(name, *one) for one in _judge_host(facts, here)]
        if host.problem:
            found.append(Finding(name, "wrong", f"{host.problem}."))
        found += _judge_network(name, host, examined)
    return found


def _describe(facts: HostFacts) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
    networks = ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in facts.addresses.items())
    gpus = f"{len(facts.gpus)} GPU{'' if len(facts.gpus) == 1 else 's'}" if facts.gpus else "no GPU"
    return f"{packages}; {gpus}; {networks or 'no network'}"


def _judge_host(facts: HostFacts, here: HostFacts | None) -> list[tuple[Literal["warning", "wrong"], str]]:
    """Problems of a host by itself, and compared with this machine."""
    found: list[tuple[Literal["warning", "wrong"], str]] = []
    difference = versions.difference(facts.versions, here.versions) if here is not None else ""
    if difference:
        found.append(("wrong", f"{difference}: install the same versions there, or name another Python with --python."))
    untested = versions.untested(facts.versions)
    if untested:
        found.append(("warning", f"{untested}."))
    found += [("wrong", f"GPU {gpu.id}: {gpu.problem}: workers will not use it.") for gpu in facts.gpus if gpu.problem]
    if facts.gpus and "+cpu" in facts.versions.get("torch", ""):
        found.append(("wrong", "its torch is built without CUDA, so its GPUs stay unused: install a build with CUDA."))
    if facts.open_files < FEW_FILES:
        most = open_files.most_workers(facts.open_files, 0)
        engines = open_files.most_engines(facts.open_files)
        text = (
            f"{facts.open_files} open files are enough for {most} workers, with %px for {engines}: raise `ulimit -Hn`."
        )
        found.append(("warning", text))
    return found


def _judge_network(name: str, host: Examined, examined: Mapping[str, Examined]) -> list[Finding]:
    """Which other hosts this one cannot connect to at any address. Connections are made both ways."""
    found = []
    for other, examination in examined.items():
        if other == name or examination.facts is None:
            continue
        tried = [one for one in host.reached if one.host == other]
        if any(not one.error for one in tried):
            continue
        text = "; ".join(f"{one.address}: {one.error}" for one in tried) or "it has no network"
        advice = "open all TCP ports between them in the firewall, or join them by a network"
        found.append(Finding(name, "wrong", f"it cannot connect to {other} ({text}): {advice}."))
    return found
