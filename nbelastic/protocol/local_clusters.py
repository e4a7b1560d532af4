"""The clusters of this user on this machine: list them, find one, claim a name, and remove dead ones.

Each cluster has a driver snapshot in its run folder. Every process of the user may read the head of the snapshot.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nbelastic.errors import UsageError
from nbelastic.protocol import agent_messages, node_messages, worker_messages
from nbelastic.protocol.json_encoding import DECODE_ERRORS
from nbelastic.protocol.messages import HEAD
from nbelastic.protocol.run_folder import RunFolder, lock_holder
from nbelastic.protocol.timeouts import DRIVER_START, TAKEOVER_PER_WORKER
from nbelastic.system import versions
from nbelastic.system.driver_lease import DriverLease
from nbelastic.system.folder_paths import remove_batch_folder, runs_folder
from nbelastic.system.process_identity import is_alive, pid_of
from nbelastic.system.processes import kill_group, machine

SNAPSHOT_FILE = "state.json"
T = TypeVar("T")


class _AnyVersion(msgspec.Struct):
    """The part of a driver snapshot that every version of nbelastic can read.

    `wire`: the `fingerprint`. `processes`: the identities of the cluster's processes on this machine. `tunnels`: those of them
    that end by themselves, each with the agent that it leads to. `number`: random, one per start of a cluster. `machine`: where
    these processes run, as several machines may share a temporary folder.
    """

    version: str
    wire: str
    name: str
    processes: tuple[str, ...] = ()
    tunnels: tuple[str, ...] = ()
    number: str = ""
    machine: str = ""

    @property
    def lives_here(self) -> bool:
        """Whether a process of the cluster is alive on this machine."""
        return any(map(is_alive, self.processes))

    @property
    def elsewhere(self) -> str:
        """The other machine on which the cluster's processes run, if any does; empty if they are of this machine."""
        return "" if self.machine in ("", machine()) or self.lives_here else self.machine.partition(" ")[0]


class SnapshotHead(_AnyVersion):
    """The part of a driver snapshot that clients read."""

    log_dir: str = ""
    owner: str = ""  # identity of the kernel with which the cluster ends; empty: it is kept
    hosts: tuple[str, ...] = ()
    slots: int = 0  # of all hosts together
    running: str = ""  # the name of the job that goes on; empty: none
    arguments: dict[str, Any] = {}  # of `Cluster`


class ClusterInfo(msgspec.Struct, frozen=True):
    """A cluster of this user on this machine."""

    name: str
    driver: int  # pid; 0: there is none
    kept: bool
    hosts: tuple[str, ...] = ()
    job: str = ""  # the name of the job that runs
    problem: str = ""  # why clients cannot attach


@cache
def fingerprint() -> str:
    """The fingerprint of all messages of the link. Versions with the same one understand each other."""
    messages = (
        agent_messages.FromAgent
        | worker_messages.FromWorker
        | node_messages.FromNode
        | agent_messages.ToAgent
        | worker_messages.ToWorker
        | node_messages.ToNode
    )
    schema = msgspec.json.encode(msgspec.json.schema(messages), order="sorted") + HEAD.format.encode()
    return hashlib.sha256(schema).hexdigest()[:16]


def read(folder: Path, kind: type[T]) -> T:
    """Read the driver snapshot in a run folder, as a `kind`.

    UsageError if it is missing, damaged, another user's, or of a version with other messages.
    """
    saved, data, mode = _read_any_version(folder)
    path = folder / SNAPSHOT_FILE
    if saved.elsewhere:
        raise UsageError(f"the cluster {folder.name!r} belongs to the machine {saved.elsewhere}: attach there.")
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"{path} is open to others, and holds keys: chmod 600 it.")
    if saved.wire != fingerprint():
        raise UsageError(
            f"the cluster {folder.name!r} was started by nbelastic {saved.version}, this is "
            f"{versions.nbelastic_version()}, and their messages differ: attach with that version."
        )
    return _decoded(path, data, kind)


def _read_any_version(folder: Path) -> tuple[_AnyVersion, bytes, int]:
    """The part that every version can read, the whole file, and its mode."""
    path = folder / SNAPSHOT_FILE
    try:
        with open(path, "rb") as file:
            found, data = os.fstat(file.fileno()), file.read()
    except FileNotFoundError:
        raise UsageError(f"there is no cluster {folder.name!r} here: {_others()}.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    if found.st_uid != os.getuid():
        raise UsageError(f"the cluster {folder.name!r} belongs to another user (uid {found.st_uid}).")
    return _decoded(path, data, _AnyVersion), data, found.st_mode


def _decoded(path: Path, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except DECODE_ERRORS as error:
        raise UsageError(
            f"{path} is damaged ({error}): the cluster cannot be attached to, and ends within its lease."
        ) from None


def _others() -> str:
    names = ", ".join(info.name for info in clusters())
    return f"there are {names}" if names else "you have none on this machine"


def find_run_folder(name: str | None) -> Path:
    """The run folder of a cluster, by its name or its path.

    Without a name: of the only kept cluster; if none is kept, of the only cluster. UsageError if there is none, or several.
    """
    if name is not None and os.sep in name:
        folder = Path(os.path.expanduser(name)).resolve()
        if folder.parent != runs_folder().resolve():
            raise UsageError(
                f"{folder} is not in {runs_folder()}, where this kernel looks for clusters: set TMPDIR to the value that the cluster had."
            )
        return folder
    if name is not None:
        return RunFolder(name).path
    found = clusters()
    names = [info.name for info in found if info.kept] or [info.name for info in found]
    if len(names) != 1:
        none = "you have no cluster on this machine: a cluster ends with its kernel, unless %elastic_start has --keep."
        raise UsageError(f"say which cluster: {', '.join(names)}." if names else none)
    return runs_folder() / names[0]


def start_timeout(folder: Path) -> float:
    """Seconds in which a driver that takes over this cluster must be ready. It may have to wait for silent workers."""
    with suppress(UsageError):  # the caller reads the snapshot later, and gets the error then
        saved = read(folder, SnapshotHead)
        return DRIVER_START + float(saved.arguments.get("silence", 0.0)) + TAKEOVER_PER_WORKER * saved.slots
    return DRIVER_START


def clusters() -> list[ClusterInfo]:
    """All clusters of this user on this machine, by name. The files of dead ones are removed."""
    return sorted(_found(), key=lambda info: info.name)


def _found() -> Iterator[ClusterInfo]:
    folder = runs_folder()
    for lock in folder.glob("*.lock"):
        name = lock.name.removesuffix(".lock")
        driver = lock_holder(lock)
        if not (folder / name / SNAPSHOT_FILE).exists():
            if driver:  # it is starting
                yield ClusterInfo(name, driver, kept=False)
            else:
                with suppress(UsageError):  # no cluster has such a name: the file is another program's
                    remove_dead_cluster(name)
            continue
        try:
            any_version, *_ = _read_any_version(folder / name)
            if not (driver or any_version.lives_here or any_version.elsewhere):
                remove_dead_cluster(name)
                continue
            saved = read(folder / name, SnapshotHead)
        except UsageError as error:
            yield ClusterInfo(name, driver, kept=False, problem=str(error))
            continue
        yield ClusterInfo(name, driver, not saved.owner, saved.hosts, saved.running)


def remove_dead_cluster(name: str, number: str = "", *, kill: bool = False) -> None:
    """Remove the files of a cluster without processes; `kill`: first kill its processes.

    Do nothing if the cluster has a driver, or if the name belongs to a cluster with another number by now. Without a
    number, do nothing if the cluster is another machine's.
    """
    run_folder = RunFolder(name)
    if not number and _other_machine(run_folder):
        return
    with suppress(UsageError):  # another process has just claimed the name
        run_folder.acquire()
        with suppress(UsageError):  # there is no snapshot yet, or it is damaged
            saved, *_ = _read_any_version(run_folder.path)
            if number not in ("", saved.number):
                run_folder.release(keep_folder=True)
                return
            for process in filter(is_alive, set(saved.processes) - set(saved.tunnels) if kill else ()):
                if pid_of(process) != os.getpid():
                    kill_group(pid_of(process))
            remove_batch_folder(name, saved.number)
        run_folder.release()


def remove_without_driver(driver_lease: DriverLease) -> None:
    """Remove the files of a cluster, keys included, whose processes end by themselves, as no driver has come.

    Do nothing while it has a driver, or may get one. If the kernel that owned it has ended, also kill its processes on this
    machine. Otherwise workers may still write a last checkpoint.
    """
    driver = driver_lease.driver
    if driver is not None and not is_alive(driver):
        remove_dead_cluster(driver_lease.name, driver_lease.number, kill=driver_lease.owner_has_ended)


def claim_name(run_folder: RunFolder, number: str) -> None:
    """Lock the name for a new cluster with this number. UsageError if a cluster has it, with or without a driver."""
    if other := _other_machine(run_folder):  # before the lock, which not every file system shares
        raise UsageError(
            f"a cluster of the machine {other} is named {run_folder.name!r}, in the same temporary folder: choose another "
            f"name. If that machine is gone, remove {run_folder.path}."
        )
    run_folder.acquire()
    try:
        _refuse_living_cluster(run_folder)
    except UsageError:
        run_folder.release(keep_folder=True)
        raise
    run_folder.write_number(number)
    run_folder.make()


def _other_machine(run_folder: RunFolder) -> str:
    """The machine to which the cluster of this name belongs; empty if it is this one, or there is no such cluster."""
    with suppress(OSError, *DECODE_ERRORS):  # there is no snapshot, or it is damaged
        return msgspec.json.decode((run_folder.path / SNAPSHOT_FILE).read_bytes(), type=_AnyVersion).elsewhere
    return ""


def _refuse_living_cluster(run_folder: RunFolder) -> None:
    """UsageError if processes of a cluster with this name run, or may run."""
    if (run_folder.path / SNAPSHOT_FILE).exists():
        saved, *_ = _read_any_version(run_folder.path)
        if saved.lives_here:
            raise UsageError(
                f"a cluster named {run_folder.name!r} runs without a driver: attach to it, or choose another name."
            )
