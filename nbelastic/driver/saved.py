"""What a driver leaves for the next one of its cluster, in its run folder: settings, keys, hosts, the job.

All of it is its owner's alone (0700, 0600). A file is replaced as a whole: a kill at any byte leaves the one before.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nbelastic import versions
from nbelastic.core import wire
from nbelastic.core.addresses import bracketed
from nbelastic.core.delivery import HEAD
from nbelastic.core.errors import UsageError
from nbelastic.core.messages import EndJob, HostSpec
from nbelastic.core.script_messages import Terms
from nbelastic.core.takeover import SavedWorld
from nbelastic.driver.discovery import ByClients, HostDiscovery, Installed, Listed, Script, Source
from nbelastic.driver.gate import SavedGate
from nbelastic.driver.places import START, RunDir, batch_folder, holder
from nbelastic.files import replace_private
from nbelastic.folders import runs
from nbelastic.link import Keys, encode
from nbelastic.presence import lives, pid_of
from nbelastic.processes import kill_group

NAME = "state.json"
A_WORKER = 0.02  # seconds that each worker adds to what a next driver may take
BY_CLIENTS = "own discovery"  # among the arguments that are kept: the key of an object of a kernel's
T = TypeVar("T")


class SavedAgent(msgspec.Struct, frozen=True):
    """An agent: which one of its host's, the process behind it on this machine (its own, or ssh's) as `pid@start`, this
    machine's address towards the host, where its workers have moved, and its job in a batch system.
    """

    number: int
    process: str
    here: str = ""
    move: wire.Rehome | None = None
    job: str = ""


class SavedJob(msgspec.Struct, frozen=True):
    """The newest job: a program, or a script.

    Of that one the number of the last round is here, the nodes of the hosts, and how it ended: it begins again.
    """

    name: str
    program: wire.Program | None = None
    script: tuple[wire.Script, Terms] | None = None
    round: int = 0
    nodes: dict[str, int] = {}
    over: EndJob | None = None


class Saved(msgspec.Struct, frozen=True):
    """`arguments`: those of `Cluster`. `term`: how many drivers it has had. `submitted`: how many jobs."""

    version: str
    wire: str
    name: str
    term: int
    address: str
    keys: Keys
    arguments: dict[str, Any]
    log_dir: str
    world: SavedWorld
    agents: dict[str, SavedAgent] = {}
    controller: str = ""
    gates: tuple[SavedGate, ...] = ()
    doors: tuple[tuple[str, str, str], ...] = ()
    started: int = 0
    submitted: int = 0
    processes: tuple[str, ...] = ()  # all on this machine that are to outlive the driver
    job: SavedJob | None = None
    number: str = ""  # of its folder for batch jobs
    owner: str = ""  # the kernel with which it ends; empty: it is kept

    @property
    def running(self) -> str:
        """The name of the job that is to go on; empty: none."""
        if self.job is None or self.job.over is not None:
            return ""
        return "" if self.world.job == self.job.name and self.world.outcome else self.job.name

    def write(self, folder: Path) -> None:
        replace_private(folder / NAME, [encode(self)])


class _Versions(msgspec.Struct):
    """What every version's file begins with."""

    version: str
    wire: str
    name: str
    processes: tuple[str, ...] = ()
    number: str = ""


class ClusterInfo(msgspec.Struct, frozen=True):
    """A cluster of this machine and user. `driver`: the driver's process, 0 if there is none. `problem`: why it cannot be
    attached to.
    """

    name: str
    driver: int
    kept: bool
    hosts: tuple[str, ...] = ()
    job: str = ""
    problem: str = ""


@cache
def fingerprint() -> str:
    """Of everything that goes over the link: two versions with the same one understand each other."""
    every = wire.FromAgent | wire.FromWorker | wire.FromNode | wire.ToAgent | wire.ToWorker | wire.ToNode
    schema = msgspec.json.encode(msgspec.json.schema(every), order="sorted") + HEAD.format.encode()
    return hashlib.sha256(schema).hexdigest()[:16]


def read(folder: Path) -> Saved:
    """UsageError if it is not there, not whole, somebody else's, or of a version that speaks otherwise."""
    theirs, data, mode = _begin_to_read(folder)
    path = folder / NAME
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"{path} is open to others, and holds keys: chmod 600 it.")
    if theirs.wire != fingerprint():
        raise UsageError(
            f"the cluster {folder.name!r} was started by nbelastic {theirs.version}, this is {versions.ours()}, and they "
            "do not speak the same language: attach with that version."
        )
    return _decoded(path, data, Saved)


def _begin_to_read(folder: Path) -> tuple[_Versions, bytes, int]:
    """What every version understands, all of the file, and its mode."""
    path = folder / NAME
    try:
        with open(path, "rb") as file:
            found, data = os.fstat(file.fileno()), file.read()
    except FileNotFoundError:
        raise UsageError(f"there is no cluster {folder.name!r} here: {_others()}.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    if found.st_uid != os.getuid():
        raise UsageError(f"the cluster {folder.name!r} belongs to another user (uid {found.st_uid}).")
    return _decoded(path, data, _Versions), data, found.st_mode


def _decoded(path: Path, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path} is damaged ({error}): the cluster cannot be attached to, and ends within its lease."
        ) from None


def _others() -> str:
    names = ", ".join(info.name for info in clusters())
    return f"there are {names}" if names else "you have none on this machine"


def find(name: str | None) -> Path:
    """The run folder of the cluster of this name, or in this folder; without either of the only one that is kept or,
    if none is, that there is. UsageError if there is none.
    """
    if name is not None and os.sep in name:
        folder = Path(os.path.expanduser(name)).resolve()
        if folder.parent != runs().resolve():
            raise UsageError(
                f"{folder} is not in {runs()}, where clusters of this kernel are: set TMPDIR as it was there."
            )
        return folder
    if name is not None:
        return RunDir(name).path
    there = clusters()
    names = [info.name for info in there if info.kept] or [info.name for info in there]
    if len(names) != 1:
        raise UsageError(f"say which cluster: {', '.join(names)}." if names else "you have no cluster on this machine.")
    return runs() / names[0]


def kept_arguments(given: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """What `Cluster` was called with, such that it can be written down and used in another folder."""
    said = {name for name, value in given.items() if value is not None or name == "elastic_timeout"}
    kept = {name: given[name] for name in given if name in said and name != "discovery"}
    kept |= {name: os.path.abspath(value) for name, value in kept.items() if name == "log_dir"}
    kept |= {name: os.fspath(value) for name, value in kept.items() if name in ("cwd", "python")}
    kept |= {name: {k: str(v) for k, v in kept[name].items()} for name in ("env", "launcher_options") if name in kept}
    kept |= {name: list(kept[name]) for name in ("preload", "cooldown") if name in kept}
    kept |= {name: dict(kept[name]) for name in ("timeouts",) if name in kept}
    match source:
        case Listed(hosts=hosts):
            kept["hosts"] = written(hosts)
        case Script(words=words):
            kept["discovery"] = shlex.join(words)
        case Installed(name=name):
            kept["discovery"] = name
        case ByClients(key=key):
            kept[BY_CLIENTS] = key
    return kept


def arguments_of(
    name: str,
    log_dir: str,
    arguments: Mapping[str, Any],
    discovery: str | HostDiscovery | None,
) -> dict[str, Any]:
    """What `Cluster` is to be called with again. An object of another kernel's cannot be said: see `BY_CLIENTS`."""
    again = {**arguments, "name": name, "log_dir": log_dir}
    again.pop(BY_CLIENTS, None)
    if discovery is not None:
        again.pop("hosts", None)
        again["discovery"] = discovery
    return again


def patience_for(folder: Path) -> float:
    """Seconds that a driver may take to be there, with all that it has to wait for if it takes over this cluster."""
    with suppress(UsageError):  # who asks will be told what is wrong
        saved = read(folder)
        silence = float(saved.arguments.get("silence", 0.0))
        return START + silence + A_WORKER * sum(host.spec.slots for host in saved.world.hosts)
    return START


def written(specs: Iterable[HostSpec]) -> list[str]:
    """As people write them."""
    return [(f"{spec.user}@" if spec.user else "") + f"{bracketed(spec.name)}:{spec.slots}" for spec in specs]


def clusters() -> list[ClusterInfo]:
    """All of this user on this machine that live, by name. What dead ones have left is removed."""
    return sorted(_found(), key=lambda info: info.name)


def _found() -> Iterator[ClusterInfo]:
    folder = runs()
    for lock in folder.glob("*.lock"):
        name = lock.name.removesuffix(".lock")
        driver = holder(lock)
        if not (folder / name / NAME).exists():
            if driver:  # it is about to start
                yield ClusterInfo(name, driver, kept=False)
            else:
                sweep(name)
            continue
        try:
            theirs, *_ = _begin_to_read(folder / name)
            if not driver and not any(map(lives, theirs.processes)):
                sweep(name)
                continue
            saved = read(folder / name)
        except UsageError as error:
            yield ClusterInfo(name, driver, kept=False, problem=str(error))
            continue
        hosts = tuple(host.spec.name for host in saved.world.hosts)
        yield ClusterInfo(name, driver, not saved.owner, hosts, saved.running)


def sweep(name: str, number: str = "", *, kill: bool = False) -> None:
    """It is dead: no process of it is left (or is to be, with `kill`), and nobody will ask for its keys.

    Nothing is done if a driver has it, or if the name is another cluster's than that of this `number`.
    """
    run_dir = RunDir(name)
    with suppress(UsageError):  # somebody takes the name at this moment
        run_dir.hold()
        with suppress(UsageError):  # it had not begun, or its file is damaged
            theirs, *_ = _begin_to_read(run_dir.path)
            if number not in ("", theirs.number):
                run_dir.let_go()
                return
            for process in filter(lives, theirs.processes if kill else ()):
                if pid_of(process) != os.getpid():
                    kill_group(pid_of(process))
            shutil.rmtree(batch_folder(name, theirs.number), ignore_errors=True)
        run_dir.release()


def begin(run_dir: RunDir, number: str) -> None:
    """Take the name for a new cluster, of this number. UsageError if there is one of that name, with or without a driver."""
    run_dir.hold()
    try:
        _be_dead(run_dir)
    except UsageError:
        run_dir.let_go()
        raise
    run_dir.sign(number)
    run_dir.make()


def _be_dead(run_dir: RunDir) -> None:
    """UsageError if a cluster of this name lives, or may."""
    if (run_dir.path / NAME).exists():
        theirs, *_ = _begin_to_read(run_dir.path)
        if any(map(lives, theirs.processes)):
            raise UsageError(
                f"a cluster named {run_dir.name!r} lives on without a driver: attach to it, or choose another name."
            )
