"""One checkpoint on disk: a folder that is either complete or ignored, and is read as data, never as code.

`<folder>/000007-commit-700` is the seventh checkpoint that was written there. It has the files of
torch.distributed.checkpoint, which other tools can read, and `manifest`, written last. The manifest is one line of JSON and
its checksum: the size and checksum of each file, and the position of each tensor. Readers use the manifest. They check `.metadata`, a pickle, as all other files, and never unpickle it.

A checkpoint is written to a temporary folder, flushed to the disk and then renamed: a kill at any moment damages none.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

from nbelastic.errors import StateError
from nbelastic.state.checkpoint_checksums import File, check_file, measured, read_sealed, write_sealed
from nbelastic.state.checkpoint_lock import unlock
from nbelastic.state.checkpoint_streams import StreamTransform
from nbelastic.state.transfer import TENSOR, why_not_plain

FORMAT = 1
MANIFEST = "manifest"
DESCRIPTION = "description"  # the name of the tensor whose bytes hold all other values
_NAME = re.compile(r"(\d{6,})-commit-(\d+)")
_WRITING, REMOVING = ".writing-", ".removing-"
_NUMBERED = re.compile(rf"({re.escape(_WRITING)})?(\d{{6,12}})(?(1)|-commit-\d+)")  # also of a reserved number


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: its shape and type, and its position in a file (bytes)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int
    length: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a checkpoint. `tensors`: the description, then the others in the order of their index in it."""

    format: int
    commits: int
    torch: str
    files: dict[str, File]
    tensors: tuple[Entry, ...]


class Snapshot(msgspec.Struct, frozen=True):
    """A state at one commit. The tensors are copies; `described` has a placeholder for each."""

    commits: int
    described: bytes
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]

    def contents(self) -> dict[str, torch.Tensor]:
        """The tensors by the names under which they are written."""
        described = torch.frombuffer(bytearray(self.described), dtype=torch.uint8)
        return {DESCRIPTION: described, **dict(zip(self.names, self.tensors, strict=True))}


def names(described: Any) -> tuple[str, ...]:
    """A name for each tensor of a description, made of its keys: `modules/model/0.weight`."""
    found: dict[str, None] = {DESCRIPTION: None}
    for path in _paths(described, ""):
        name = path
        while name in found:  # a key with a slash in it, or 1 beside "1"
            name += "~"
        found[name] = None
    return tuple(found)[1:]


def _paths(described: Any, path: str) -> Iterator[str]:
    if isinstance(described, tuple) and described and isinstance(described[0], str) and described[0] == TENSOR:
        yield path
    elif isinstance(described, (dict, list, tuple)):
        items = described.items() if isinstance(described, dict) else enumerate(described)
        for key, item in items:
            yield from _paths(item, f"{path}/{key}" if path else str(key))


# ---- the folder ----


def listed(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first, incomplete ones included."""
    found = [(int(match[1]), int(match[2]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for *_, path in sorted(found, reverse=True)]


def commits_of(path: Path) -> int:
    """The number of commits in the name of a `listed` checkpoint."""
    return int(path.name.rpartition("-")[2])


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint, rather than a folder of them."""
    return _NAME.fullmatch(path.name) is not None or (path / MANIFEST).exists()


def prepare(folder: Path) -> None:
    """Make the folder. StateError if checkpoints cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{REMOVING}{uuid.uuid4().hex}"
        probe.mkdir()
        with contextlib.suppress(FileNotFoundError):  # a rank that writes here has removed it: see `tidy`
            probe.rmdir()
    except OSError as error:
        raise StateError(
            f"checkpoints cannot be written to {folder} ({reason(error)}): give checkpoint another folder."
        ) from None


def tidy(folder: Path, keep: int | None = None) -> None:
    """Remove the temporary folders of killed processes, and all but the newest `keep` checkpoints."""
    for path in listed(folder)[keep:] if keep else ():
        with contextlib.suppress(OSError):  # another process has removed it
            path.rename(folder / f"{REMOVING}{uuid.uuid4().hex}")
    for path in folder.glob(f"{REMOVING}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"{_WRITING}*"):
        with contextlib.suppress(OSError), _locked(path):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def reserved(folder: Path) -> Iterator[tuple[Path, int]]:
    """A locked temporary folder, and a number for its checkpoint: the next one now, as the training may return to an old commit.

    So a checkpoint that is written slowly does not come after one that another process has begun and completed meanwhile.
    """
    number = 0
    while True:
        known = [int(match[2]) for path in folder.iterdir() if (match := _NUMBERED.fullmatch(path.name))]
        number = max(number, *known, 0) + 1
        temporary = folder / f"{_WRITING}{number:06d}"
        with contextlib.suppress(FileExistsError):  # another process has reserved it meanwhile
            temporary.mkdir()
            break
    try:
        with _locked(temporary, needed=False):
            yield temporary, number
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, *, needed: bool = True) -> Iterator[None]:
    """Lock a folder that is being written, until this process ends. BlockingIOError if another process has locked it.

    Some file systems have no locks: OSError if it is `needed`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if needed or isinstance(error, BlockingIOError):
                raise
        yield
    finally:
        unlock(descriptor)


# ---- writing ----


def write(folder: Path, snapshot: Snapshot, keep: int) -> Path:
    """Write a checkpoint and remove all but the newest `keep`. Raises OSError and StateError."""
    _read_described(snapshot.described)  # StateError if a reader could not load it
    with reserved(folder) as (temporary, number):
        entries = _write_tensors(temporary, snapshot.contents())
        _write_manifest(temporary, snapshot.commits, entries)
        flush(temporary)
        path = rename(temporary, folder, snapshot.commits, number)
    flush(folder)
    tidy(folder, keep)
    return still_there(path)


def still_there(path: Path) -> Path:
    """StateError if this checkpoint, which was complete, has been removed."""
    if not path.exists():
        raise StateError("newer ones were written meanwhile")
    return path


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[Entry, ...]:
    """Write them with the parts of torch.distributed.checkpoint.

    `dcp.save` would use the default group, which another thread may be closing, and would warn that only one rank saves.
    """
    writer = FileSystemWriter(path, sync_files=False, per_thread_copy_ahead=0)
    writer.transforms = StreamTransform()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, storage_meta=writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    results = writer.write_data(plan, planner).wait()
    writer.finish(metadata, [results])
    positions = {result.index.fqn: result.storage_data for result in results}
    return tuple(
        Entry(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            file=positions[name].relative_path,
            offset=positions[name].offset,
            length=positions[name].length,
        )
        for name, tensor in tensors.items()
    )


def _write_manifest(path: Path, commits: int, entries: tuple[Entry, ...]) -> None:
    """Flush all files to the disk, and write their sizes and checksums; torch leaves its last block in a buffer."""
    files = {}
    for file in sorted(path.iterdir()):
        flush(file)
        files[file.name] = measured(file)
    write_sealed(
        path / MANIFEST, msgspec.json.encode(Manifest(FORMAT, commits, str(torch.__version__), files, entries))
    )


def rename(temporary: Path, folder: Path, commits: int, number: int) -> Path:
    """Use this number, or the next one that is free."""
    while True:
        path = folder / f"{number:06d}-commit-{commits}"
        try:
            temporary.rename(path)
        except OSError:
            if not path.exists():  # else another process has used this number
                raise
            number += 1
        else:
            return path


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading ----


def verify(path: Path) -> Manifest:
    """The manifest of a checkpoint, whose files are checked against it. StateError says what is wrong."""
    try:
        manifest = _read_manifest(path)
        for name, file in manifest.files.items():
            check_file(path, name, file)
    except OSError as error:
        raise StateError(reason(error)) from None
    return manifest


def _read_manifest(path: Path) -> Manifest:
    if not (path / MANIFEST).exists():
        raise StateError(f"it has no {MANIFEST}")
    line = read_sealed(path / MANIFEST)
    try:
        version = msgspec.json.decode(line, type=dict[str, Any]).get("format")
        if version != FORMAT:
            raise StateError(f"it is of format {version}, and this version of nbelastic reads format {FORMAT}")
        manifest = msgspec.json.decode(line, type=Manifest)
    except msgspec.MsgspecError as error:
        raise StateError(f"{MANIFEST} cannot be read ({error})") from None
    if not manifest.tensors or manifest.tensors[0].name != DESCRIPTION:
        raise StateError(f"it has no {DESCRIPTION}")
    if any(entry.file not in manifest.files for entry in manifest.tensors):
        raise StateError(f"{MANIFEST} names a file that it does not list")
    return manifest


def read_description(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The state with placeholders for the tensors."""
    place = torch.empty(manifest.tensors[0].shape, dtype=torch.uint8)
    read_tensors(path, manifest.tensors[:1], [place])
    described = _read_described(place.numpy().tobytes())
    if not isinstance(described, dict):
        raise StateError(f"its {DESCRIPTION} is not a dictionary")
    return described


def _read_described(data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # noqa: BLE001  (torch raises many kinds)
        raise StateError(f"the state holds something that is not plain data ({why_not_plain(error)})") from None


def read_tensors(path: Path, entries: Sequence[Entry], places: Sequence[torch.Tensor]) -> None:
    """Read the tensors of `entries` into `places`. StateError if these have other shapes or types."""
    if len(entries) != len(places):
        raise StateError(f"it has {len(entries)} tensors, and this state has {len(places)}")
    for entry, place in zip(entries, places, strict=True):
        if (entry.shape, entry.dtype) != (tuple(place.shape), str(place.dtype).removeprefix("torch.")):
            raise StateError(f"{entry.name} has another shape or type than its description says")
    tensors = {entry.name: place for entry, place in zip(entries, places, strict=True)}
    reader = _ManifestReader(path, entries)
    metadata = reader.read_metadata()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(reader.prepare_global_plan(plans)[0]), planner).wait()


class _ManifestReader(FileSystemReader):  # type: ignore[misc]  # torch carries no types here
    """Makes from the manifest what torch would unpickle from `.metadata`; torch reads the tensors with `weights_only`."""

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        super().__init__(path)
        self._entries = entries

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        tensors, storage = {}, {}
        for entry in self._entries:
            size = torch.Size(entry.shape)
            start = torch.Size([0] * len(size))
            properties = TensorProperties(dtype=getattr(torch, entry.dtype))
            tensors[entry.name] = TensorStorageMetadata(properties, size, [ChunkStorageMetadata(start, size)])
            storage[MetadataIndex(entry.name, start)] = _StorageInfo(entry.file, entry.offset, entry.length)
        return Metadata(tensors, storage_data=storage)


def reason(error: BaseException) -> str:
    """An error in words: of the disk without its type, any other with it."""
    if isinstance(error, StateError):
        return str(error)
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):  # torch's writer wraps it
        error = error.__context__
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}".partition("\n")[0]
