"""Where hosts come from: a fixed list, a script, or an installed discovery. All are polled in the background."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Self

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
from nbelastic.provision.run_program import run_program
from nbelastic.system.addresses import bracketed
from nbelastic.system.argument_types import NAMES, TEXT, WHOLE, check_kind
from nbelastic.system.backoff import Backoff

GROUP = "nbelastic.discovery"  # entry points; each is called with the slots (or None) and returns a HostDiscovery
SCRIPT_TIMEOUT = 30.0  # seconds that a discovery script may take
DISCOVERY_TIMEOUT = 35.0  # seconds that any discovery may take; longer than a script's, whose error is more exact
POLL = 1.0  # seconds between two polls
LONGEST_PAUSE = 30.0  # seconds between two polls of a discovery that keeps failing


class FixedHosts:
    """A list that only `set()` changes: `FixedHosts("gpu1:4,gpu2:4")`."""

    def __init__(self, hosts: str | Sequence[str], slots: int = 1) -> None:
        check_kind("slots", slots, WHOLE)
        self._slots = slots
        self.set(hosts)

    def set(self, hosts: str | Sequence[str]) -> None:
        """Replace the list. UsageError if a host is invalid or listed twice."""
        self._hosts = listed_hosts(hosts, self._slots)

    def listed(self) -> Sequence[HostSpec]:
        return self._hosts

    async def hosts(self) -> Sequence[HostSpec]:
        return self._hosts


class ScriptDiscovery:
    """A program that prints one host per line, as `name` or `name:slots`. Each poll runs it.

    It runs in the folder that was the working folder when this object was made. `command` may have arguments: `"./hosts.sh gpu"`. Processes that the script leaves in its process group are killed.
    """

    def __init__(self, command: str, slots: int = 1) -> None:
        """UsageError if `command` is empty or has an unclosed quote."""
        check_kind("command", command, TEXT)
        check_kind("slots", slots, WHOLE)
        try:
            words = [command] if os.path.isfile(command) else shlex.split(command)
        except ValueError as error:
            raise UsageError(f"{command!r} is not a valid command: {error}.") from None
        if not words:
            raise UsageError("the discovery is empty: name a script that prints one host per line.")
        self.source = ScriptSource(command, (_program_path(words[0]), *words[1:]), slots, os.getcwd())

    @property
    def program(self) -> str:
        """The script's full path, or its bare name if it was not found."""
        return self.source.words[0]

    async def hosts(self) -> Sequence[HostSpec]:
        """DiscoveryError with the script's exit code and stderr, or with the line that is not a host."""
        script = self.source
        code, out, err = await run_program(script.words, SCRIPT_TIMEOUT, name=script.command, folder=script.folder)
        if code:
            message = err.strip()[-500:] or "no message"
            raise DiscoveryError(f"{script.command} failed with exit code {code}: {message}")
        try:
            return parse_script_output(out, script.slots)
        except UsageError as error:
            raise DiscoveryError(f"{script.command} did not print a list of hosts: {error}") from None

    @classmethod
    def from_source(cls, source: ScriptSource) -> Self:
        """The discovery that a client has described to its driver."""
        discovery = cls.__new__(cls)
        discovery.source = source
        return discovery


def listed_hosts(hosts: str | Sequence[str], slots: int, *, follow_gpus: bool = False) -> tuple[HostSpec, ...]:
    """Parse a list of hosts. UsageError if a host is invalid or listed twice."""
    if not isinstance(hosts, str):
        check_kind("hosts", hosts, NAMES._replace(words='text or a list of texts, as "gpu1:4"'))
    return parse_hosts(hosts if isinstance(hosts, str) else ",".join(hosts), slots, follow_gpus=follow_gpus)


def source_of(
    given: str | HostDiscovery | None, hosts: str | Sequence[str] | None, slots: int | None, default: int
) -> Source:
    """Describe to the driver where `Cluster(hosts, discovery=given, slots=slots)` gets its hosts from.

    Hosts without a number get `default` slots; without `slots`, as many as GPUs. UsageError as from `find_discovery`.
    """
    if given is None:
        return ListedHosts(listed_hosts(hosts or "localhost", default, follow_gpus=slots is None))
    discovery = find_discovery(given, slots, default) if isinstance(given, str) else given
    if type(discovery) is ScriptDiscovery:  # not a subclass, whose hosts() may return other hosts
        return discovery.source
    return EntryPoint(given, slots) if isinstance(given, str) else ClientDiscovery(uuid.uuid4().hex)


def open_discovery(source: ScriptSource | EntryPoint) -> HostDiscovery:
    """The discovery that runs in the driver. UsageError for an entry point that does not work."""
    if isinstance(source, ScriptSource):
        return ScriptDiscovery.from_source(source)
    return find_discovery(source.name, source.slots)


def find_discovery(text: str, slots: int | None, default: int = 1) -> HostDiscovery:
    """The discovery of `--discover TEXT`: an entry point of the group `nbelastic.discovery`, else a script's path.

    An entry point is called with `slots`, which is None if the user gave no number. `name:rest` calls it with `rest`, too.
    A script's lines without a number get `slots`, else `default`. An entry point takes precedence over a script of the same
    name, which is `./name`.
    UsageError if the text is neither, or if the entry point cannot be loaded.
    """
    installed = entry_points(group=GROUP)
    name, colon, rest = text.partition(":")
    for entry in installed.select(name=name):
        try:
            discovery = entry.load()(slots, *([rest] if colon else []))
        except NbelasticError:
            raise
        except Exception as error:
            raise UsageError(f"the discovery {text!r} ({entry.value}) does not work: {error!r}.") from error
        if not isinstance(discovery, HostDiscovery):
            raise UsageError(f"the discovery {text!r} ({entry.value}) returned {discovery!r}, which has no hosts().")
        return discovery
    script = ScriptDiscovery(text, slots or default)
    if not (os.path.isfile(script.program) and os.access(script.program, os.X_OK)):
        names = ", ".join(sorted(installed.names)) or "none"
        raise UsageError(
            f"{text!r} is neither an executable file nor an installed discovery ({names}): check its path and mode (chmod +x)."
        )
    return script


class DiscoveryThread:
    """Runs a discovery in a separate thread, so that one that blocks does not delay the caller's loop."""

    def __init__(self, discovery: HostDiscovery) -> None:
        self._discovery, self._timeout = discovery, DISCOVERY_TIMEOUT
        self._thread: threading.Thread | None = None
        self._answer: asyncio.Future[tuple[tuple[HostSpec, ...], NbelasticError | None]] | None = None

    async def hosts(self) -> tuple[HostSpec, ...]:
        """Poll the discovery. NbelasticError if it fails, does not answer in time, or returns anything but hosts."""
        if self._thread is None:
            self._caller_loop = asyncio.get_running_loop()
            self._thread_loop = asyncio.new_event_loop()
            self._ended = asyncio.Event()
            self._thread = threading.Thread(target=self._run_loop, name="nbelastic-discovery", daemon=True)
            self._thread.start()
        if self._answer is None:  # else the previous poll still blocks
            self._answer = self._caller_loop.create_future()
            self._thread_loop.call_soon_threadsafe(self._begin, self._answer)
        done, _ = await asyncio.wait({self._answer}, timeout=self._timeout + 1.0)
        if not done:
            raise DiscoveryError(f"{self._name} did not answer within {self._timeout:g} s, and blocks its thread.")
        (hosts, error), self._answer = self._answer.result(), None
        if error is not None:
            raise error
        return hosts

    async def close(self) -> None:
        """Cancel a poll that runs; wait for the thread up to 1 s."""
        if self._thread is not None:
            self._thread_loop.call_soon_threadsafe(self._thread_loop.stop)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 1.0)

    @property
    def _name(self) -> str:
        return type(self._discovery).__name__

    def _run_loop(self) -> None:
        self._thread_loop.run_forever()
        tasks = asyncio.all_tasks(self._thread_loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._thread_loop.run_until_complete(asyncio.wait(tasks))
        self._thread_loop.close()
        with suppress(RuntimeError):  # the caller's loop is closed
            self._caller_loop.call_soon_threadsafe(self._ended.set)

    def _begin(self, answer: asyncio.Future[tuple[tuple[HostSpec, ...], NbelasticError | None]]) -> None:
        self._task = self._thread_loop.create_task(self._poll(answer))

    async def _poll(self, answer: asyncio.Future[tuple[tuple[HostSpec, ...], NbelasticError | None]]) -> None:
        hosts: tuple[HostSpec, ...] = ()
        error: NbelasticError | None = None
        timeout = asyncio.timeout(self._timeout)
        try:
            async with timeout:
                hosts = _validated(await self._discovery.hosts(), self._name)
        except NbelasticError as problem:
            error = problem
        except (Exception, asyncio.CancelledError, SystemExit) as problem:  # noqa: BLE001  (a third party's may raise anything)
            late = f"did not answer within {self._timeout:g} s" if timeout.expired() else f"raised {problem!r}"
            error = DiscoveryError(f"{self._name} {late}.")
        with suppress(RuntimeError):  # the caller's loop is closed
            self._caller_loop.call_soon_threadsafe(answer.set_result, (hosts, error))


async def poll_discovery(
    discovery: HostDiscovery,
    on_change: Callable[[tuple[HostSpec, ...]], object],
    on_failure: Callable[[str], object],
    on_recovery: Callable[[str], object],
) -> None:
    """Poll a discovery once a second, less often while it fails, until cancelled.

    Call `on_change` for each new list of hosts, `on_failure` once for each new failure, `on_recovery` after the last.
    """
    last_hosts: tuple[HostSpec, ...] | None = None
    last_failure, failing_since = "", 0.0
    backoff = Backoff(POLL, LONGEST_PAUSE)
    thread = DiscoveryThread(discovery)
    try:
        while True:
            pause = POLL
            try:
                hosts = await thread.hosts()
            except NbelasticError as error:
                failing_since = failing_since or time.monotonic()
                pause = backoff.next()
                failure = without_numbers(error)
                if failure != last_failure:
                    last_failure = failure
                    on_failure(str(error))
            else:
                backoff.reset()
                if last_failure:
                    on_recovery(f"host discovery answers again, after {time.monotonic() - failing_since:.0f} s")
                    last_failure, failing_since = "", 0.0
                if last_hosts is None or {*hosts} != {*last_hosts}:  # a script may print a set, in any order
                    last_hosts = hosts
                    on_change(hosts)
            await asyncio.sleep(pause)
    finally:
        await thread.close()


def without_numbers(error: Exception) -> str:
    """The error's text with `#` for each number: another time of day does not make it a new failure."""
    return re.sub(r"\d+", "#", str(error))


def _program_path(word: str) -> str:
    """The absolute path of a file, else that of a program on the PATH, else `word` itself."""
    if os.path.exists(word) or os.path.dirname(word):
        return os.path.abspath(os.path.expanduser(word))
    return shutil.which(word) or word


def _validated(hosts: Sequence[HostSpec], discovery: str) -> tuple[HostSpec, ...]:
    """The hosts that a third party's discovery returned. DiscoveryError if they are not valid hosts."""
    hosts = tuple(hosts)
    for host in hosts:
        if not isinstance(host, HostSpec) or not isinstance(host.slots, int) or host.slots < 1:
            raise DiscoveryError(f"{discovery} returned {host!r}: hosts are HostSpecs with at least 1 slot.")
        parse_host(bracketed(host.name), 1)
    names = [host.name for host in hosts]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DiscoveryError(f"{discovery} returned the host {repeated[0]!r} more than once.")
    return tuple(HostSpec(host.name, int(host.slots), host.user or "") for host in hosts)
