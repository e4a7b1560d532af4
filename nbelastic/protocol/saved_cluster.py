"""Clusters of this user on this machine: what of their saved files every process may read, and which are dead."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nbelastic.errors import UsageError
from nbelastic.protocol import agent_messages, node_messages, worker_messages
from nbelastic.protocol.messages import HEAD
from nbelastic.protocol.run_directory import START, RunDir, holder
from nbelastic.system import versions
from nbelastic.system.folders import batch_folder, runs
from nbelastic.system.presence import lives, pid_of
from nbelastic.system.processes import kill_group

NAME = "state.json"
A_WORKER = 0.02  # seconds that each worker adds to what a next driver may take
T = TypeVar("T")


class _Versions(msgspec.Struct):
    """What every version's file begins with."""

    version: str
    wire: str
    name: str
    processes: tuple[str, ...] = ()
    number: str = ""


class Head(_Versions):
    """What a kernel needs of the file. `running`: the name of the job that is to go on; `slots`: of all `hosts` together.

    `owner`: the kernel with which the cluster ends; empty: it is kept. `arguments`: those of `Cluster`.
    """

    log_dir: str = ""
    owner: str = ""
    hosts: tuple[str, ...] = ()
    slots: int = 0
    running: str = ""
    arguments: dict[str, Any] = {}


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
    every = (
        agent_messages.FromAgent
        | worker_messages.FromWorker
        | node_messages.FromNode
        | agent_messages.ToAgent
        | worker_messages.ToWorker
        | node_messages.ToNode
    )
    schema = msgspec.json.encode(msgspec.json.schema(every), order="sorted") + HEAD.format.encode()
    return hashlib.sha256(schema).hexdigest()[:16]


def read(folder: Path, kind: type[T]) -> T:
    """The file as a `kind`. UsageError if it is not there, not whole, somebody else's, or of a version that speaks otherwise."""
    theirs, data, mode = _begin_to_read(folder)
    path = folder / NAME
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"{path} is open to others, and holds keys: chmod 600 it.")
    if theirs.wire != fingerprint():
        raise UsageError(
            f"the cluster {folder.name!r} was started by nbelastic {theirs.version}, this is {versions.ours()}, and they "
            "do not speak the same language: attach with that version."
        )
    return _decoded(path, data, kind)


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


def patience_for(folder: Path) -> float:
    """Seconds that a driver may take to be there, with all that it has to wait for if it takes over this cluster."""
    with suppress(UsageError):  # who asks will be told what is wrong
        saved = read(folder, Head)
        return START + float(saved.arguments.get("silence", 0.0)) + A_WORKER * saved.slots
    return START


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
            saved = read(folder / name, Head)
        except UsageError as error:
            yield ClusterInfo(name, driver, kept=False, problem=str(error))
            continue
        yield ClusterInfo(name, driver, not saved.owner, saved.hosts, saved.running)


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
