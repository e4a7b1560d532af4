"""Where hosts come from. The driver looks in the background and never waits for it."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from typing import IO, NamedTuple, Self

from nbelastic.errors import DiscoveryError, NbelasticError, UsageError
from nbelastic.protocol.host_parsing import parse_host, parse_hosts, parse_script_output
from nbelastic.protocol.host_sources import (
    ClientDiscovery,
    EntryPoint,
    HostDiscovery,
    ListedHosts,
    ScriptSource,
    Source,
)
from nbelastic.protocol.ids import HostSpec
from nbelastic.system.addresses import bracketed
from nbelastic.system.argument_types import NAMES, TEXT, WHOLE, check_kind
from nbelastic.system.processes import kill_group

GROUP = "nbelastic.discovery"  # of the entry points: each is called with the slots (or None) and gives a HostDiscovery
TIMEOUT = 30.0  # seconds that a discovery script may take
PATIENCE = 35.0  # seconds that any discovery may take; a script says more exactly itself what was wrong
LIMIT = 1 << 20  # bytes that a program may write
POLL = 1.0  # seconds between looks
LONGEST_PAUSE = 30.0  # seconds between looks at one that keeps failing
LAST_WORDS = 0.5  # seconds for what a program wrote before it ended, if something it started keeps its output open


class FixedHosts:
    """A list that changes only when it is told to: `FixedHosts("gpu1:4,gpu2:4")`."""

    def __init__(self, hosts: str | Sequence[str], slots: int = 1) -> None:
        check_kind("slots", slots, WHOLE)
        self._slots = slots
        self.set(hosts)

    def set(self, hosts: str | Sequence[str]) -> None:
        """Replace the list. UsageError if a host is badly written or listed twice."""
        if not isinstance(hosts, str):
            check_kind("hosts", hosts, NAMES._replace(words='text or a list of texts, as "gpu1:4"'))
        text = hosts if isinstance(hosts, str) else ",".join(hosts)
        self._hosts = parse_hosts(text, self._slots)

    def listed(self) -> Sequence[HostSpec]:
        return self._hosts

    async def hosts(self) -> Sequence[HostSpec]:
        return self._hosts


class ScriptDiscovery:
    """A program that prints a host a line, `name` or `name:slots`; it is run for each look, in the folder of now.

    `command` may have arguments: `"./hosts.sh gpu"`. What the script leaves behind in its process group is ended.
    """

    def __init__(self, command: str, slots: int = 1) -> None:
        """UsageError if `command` is empty or has an unclosed quote."""
        check_kind("command", command, TEXT)
        check_kind("slots", slots, WHOLE)
        try:
            words = [command] if os.path.isfile(command) else shlex.split(command)
        except ValueError as error:
            raise UsageError(f"{command!r} is no command: {error}.") from None
        if not words:
            raise UsageError("the discovery is empty: name a script that prints the hosts, one a line.")
        self.source = ScriptSource(command, (_program(words[0]), *words[1:]), slots, os.getcwd())

    @property
    def program(self) -> str:
        """The script's full path, or its bare name if it is nowhere to be found."""
        return self.source.words[0]

    async def hosts(self) -> Sequence[HostSpec]:
        """DiscoveryError with the script's exit code and what it wrote to stderr, or with the line that is wrong."""
        script = self.source
        code, out, err = await finish(script.words, TIMEOUT, name=script.command, folder=script.folder)
        if code:
            said = err.strip()[-500:] or "no message"
            raise DiscoveryError(f"{script.command} failed with exit code {code}: {said}")
        try:
            return parse_script_output(out, script.slots)
        except UsageError as error:
            raise DiscoveryError(f"{script.command} printed something else than hosts: {error}") from None

    @classmethod
    def of(cls, script: ScriptSource) -> Self:
        """The same again, as a driver was told of it."""
        found = cls.__new__(cls)
        found.source = script
        return found


def source_of(
    given: str | HostDiscovery | None, hosts: str | Sequence[str] | None, slots: int | None, default: int
) -> Source:
    """Where `Cluster(hosts, discovery=given, slots=slots)` has hosts come from; lines without a number get `default` slots.

    UsageError for what cannot be: see `find`.
    """
    if given is None:
        return ListedHosts(tuple(FixedHosts(hosts or "localhost", default).listed()))
    found = find(given, slots, default) if isinstance(given, str) else given
    if type(found) is ScriptDiscovery:  # one that is derived from it may say other hosts
        return found.source
    return EntryPoint(given, slots) if isinstance(given, str) else ClientDiscovery(uuid.uuid4().hex)


def opened(source: ScriptSource | EntryPoint) -> HostDiscovery:
    """In the driver. UsageError for an entry point that does not work."""
    return ScriptDiscovery.of(source) if isinstance(source, ScriptSource) else find(source.name, source.slots)


def find(text: str, slots: int | None, default: int = 1) -> HostDiscovery:
    """What `--discover TEXT` means: an entry point of the group `nbelastic.discovery`, else a script's path.

    An entry point is called with `slots`, which is None if nobody has given a number; a script's lines without one
    get `slots` or else `default`. An entry point goes before a script of the same name: that one is `./name`.
    UsageError if the text is neither, or if the entry point cannot be loaded.
    """
    known = entry_points(group=GROUP)
    for entry in known.select(name=text):
        try:
            found = entry.load()(slots)
        except NbelasticError:
            raise
        except Exception as error:
            raise UsageError(f"the discovery {text!r} ({entry.value}) does not work: {error!r}.") from error
        if not isinstance(found, HostDiscovery):
            raise UsageError(f"the discovery {text!r} ({entry.value}) gives {found!r}, which has no hosts().")
        return found
    script = ScriptDiscovery(text, slots or default)
    if not (os.path.isfile(script.program) and os.access(script.program, os.X_OK)):
        names = ", ".join(sorted(known.names)) or "none"
        raise UsageError(
            f"{text!r} is no executable file, nor an installed discovery ({names}): check its path and mode (chmod +x)."
        )
    return script


class Lookout:
    """Asks a discovery from a thread of its own: one that hangs, or blocks, delays nobody."""

    def __init__(self, discovery: HostDiscovery) -> None:
        self._discovery, self._patience = discovery, PATIENCE
        self._thread: threading.Thread | None = None
        self._answer: asyncio.Future[tuple[tuple[HostSpec, ...], NbelasticError | None]] | None = None

    async def look(self) -> tuple[HostSpec, ...]:
        """The hosts. NbelasticError if there is no answer, or none in time, or not one that can be used."""
        if self._thread is None:
            self._home = asyncio.get_running_loop()
            self._away = asyncio.new_event_loop()
            self._ended = asyncio.Event()
            self._thread = threading.Thread(target=self._serve, name="nbelastic-discovery", daemon=True)
            self._thread.start()
        if self._answer is None:  # else it still blocks since the last look
            self._answer = self._home.create_future()
            self._away.call_soon_threadsafe(self._begin, self._answer)
        done, _ = await asyncio.wait({self._answer}, timeout=self._patience + 1.0)
        if not done:
            raise DiscoveryError(f"{self._name} did not answer within {self._patience:g} s, and blocks its thread.")
        (found, error), self._answer = self._answer.result(), None
        if error is not None:
            raise error
        return found

    async def close(self) -> None:
        """What is under way is ended, if it can be."""
        if self._thread is not None:
            self._away.call_soon_threadsafe(self._away.stop)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 1.0)

    @property
    def _name(self) -> str:
        return type(self._discovery).__name__

    def _serve(self) -> None:
        self._away.run_forever()
        tasks = asyncio.all_tasks(self._away)
        for task in tasks:
            task.cancel()
        if tasks:
            self._away.run_until_complete(asyncio.wait(tasks))
        self._away.close()
        with suppress(RuntimeError):  # nobody waits any more
            self._home.call_soon_threadsafe(self._ended.set)

    def _begin(self, answer: asyncio.Future[tuple[tuple[HostSpec, ...], NbelasticError | None]]) -> None:
        self._task = self._away.create_task(self._ask(answer))

    async def _ask(self, answer: asyncio.Future[tuple[tuple[HostSpec, ...], NbelasticError | None]]) -> None:
        found: tuple[HostSpec, ...] = ()
        error: NbelasticError | None = None
        timeout = asyncio.timeout(self._patience)
        try:
            async with timeout:
                found = _checked(await self._discovery.hosts(), self._name)
        except NbelasticError as problem:
            error = problem
        except Exception as problem:  # noqa: BLE001  (a third party's discovery may raise anything)
            late = f"did not answer within {self._patience:g} s" if timeout.expired() else f"raised {problem!r}"
            error = DiscoveryError(f"{self._name} {late}.")
        with suppress(RuntimeError):  # nobody waits any more
            self._home.call_soon_threadsafe(answer.set_result, (found, error))


async def watch(
    discovery: HostDiscovery,
    found: Callable[[tuple[HostSpec, ...]], object],
    failed: Callable[[str], object],
    recovered: Callable[[str], object],
) -> None:
    """For ever: ask where hosts come from, once a second; after failures more rarely. Call `found` after each change.

    Each new failure is told once, and its end.
    """
    last: tuple[HostSpec, ...] | None = None
    told, since, pause = "", 0.0, POLL
    lookout = Lookout(discovery)
    try:
        while True:
            try:
                hosts = await lookout.look()
            except NbelasticError as error:
                since = since or time.monotonic()
                pause = min(2 * pause, LONGEST_PAUSE) if told else POLL
                if gist(error) != told:
                    told = gist(error)
                    failed(str(error))
            else:
                pause = POLL
                if told:
                    recovered(f"host discovery answers again, after {time.monotonic() - since:.0f} s")
                    told, since = "", 0.0
                if hosts != last:
                    last = hosts
                    found(hosts)
            await asyncio.sleep(pause)
    finally:
        await lookout.close()


def gist(error: Exception) -> str:
    """The same for two errors that differ in numbers only, as in the time of day."""
    return re.sub(r"\d+", "#", str(error))


class Finished(NamedTuple):
    """A program's end: its exit code (negative: a signal) and what it wrote."""

    code: int
    out: str
    err: str


async def finish(argv: Sequence[str], seconds: float, *, name: str = "", folder: str | None = None) -> Finished:
    """Run a program to its end, without input, in a process group that does not outlive this call.

    DiscoveryError if it cannot be run, takes longer than `seconds`, or writes more than 1 MiB.
    """
    name = name or argv[0]
    process, output, errors = _begin(argv, name, folder)
    exited, out, err = _Exit(process.pid), _Output(output), _Output(errors)
    try:
        async with asyncio.timeout(seconds):
            await _first(exited.seen, out.too_much, err.too_much)
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    await asyncio.gather(out.ended.wait(), err.ended.wait())
    except TimeoutError:
        raise DiscoveryError(f"{name} did not answer within {seconds:g} s.") from None
    finally:
        kill_group(process.pid)  # before its exit is taken, while the number is surely its own
        with suppress(TimeoutError):  # one that even SIGKILL does not end waits for a broken disk
            await asyncio.wait_for(exited.seen.wait(), 1.0)
        process.poll()
        for each in (exited, out, err):
            each.close()
    if out.too_much.is_set() or err.too_much.is_set():
        raise DiscoveryError(f"{name} wrote more than {LIMIT >> 20} MiB: it shall print a host a line, and no more.")
    return Finished(process.returncode or 0, out.text(), err.text())


def _begin(argv: Sequence[str], name: str, folder: str | None) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]:
    """Not asyncio's: that one's end waits for the pipes too, which a grandchild may keep open."""
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    try:
        process = subprocess.Popen(argv, stdin=nothing, stdout=pipe, stderr=pipe, cwd=folder, start_new_session=True)
    except OSError as error:
        raise DiscoveryError(f"{name} cannot be run: {error.strerror}; check its path and mode.") from None
    assert process.stdout is not None
    assert process.stderr is not None
    return process, process.stdout, process.stderr


class _Exit:
    """`seen` is set when the process `pid`, a child of ours, has ended. Its exit code is not taken."""

    def __init__(self, pid: int) -> None:
        self.seen = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._fd = os.pidfd_open(pid)
        self._loop.add_reader(self._fd, self._see)

    def _see(self) -> None:
        self._loop.remove_reader(self._fd)
        self.seen.set()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class _Output:
    """What a program writes, taken as it comes, up to LIMIT."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.ended, self.too_much = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pipe, self._taken = pipe, bytearray()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._take)

    def _take(self) -> None:
        try:
            data = os.read(self._pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return
        self._taken += data
        if len(self._taken) > LIMIT:
            self.too_much.set()
        if not data or len(self._taken) > LIMIT:
            self.ended.set()
            self._loop.remove_reader(self._pipe.fileno())

    def text(self) -> str:
        return self._taken.decode(errors="replace")

    def close(self) -> None:
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()


async def _first(*events: asyncio.Event) -> None:
    """Wait for one of them."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _program(word: str) -> str:
    """A file as seen from here, else a program on the PATH, else the word itself."""
    if os.path.exists(word) or os.path.dirname(word):
        return os.path.abspath(os.path.expanduser(word))
    return shutil.which(word) or word


def _checked(found: Sequence[HostSpec], who: str) -> tuple[HostSpec, ...]:
    """What a third party's discovery gave. DiscoveryError if it is no list of hosts."""
    hosts = tuple(found)
    for host in hosts:
        if not isinstance(host, HostSpec) or not isinstance(host.slots, int) or host.slots < 1:
            raise DiscoveryError(f"{who} gave {host!r}: hosts are HostSpecs with at least 1 slot.")
        parse_host(bracketed(host.name), 1)
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DiscoveryError(f"{who} gave the host {twice[0]!r} more than once.")
    return tuple(HostSpec(host.name, int(host.slots), host.user or "") for host in hosts)
