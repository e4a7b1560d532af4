"""One checkpoint on disk: a folder that is whole or does not count, read as data and never as code.

`<folder>/000007-commit-700` is the seventh checkpoint that was written there. It holds what torch.distributed.checkpoint
writes, which other tools can read, and `manifest`, written last: a line of JSON with the size and checksum of each file
and the place of each tensor, and the checksum of that line. Reading goes by the manifest. `.metadata`, a pickle, is
checked like the rest and never opened.

Everything is written beside its place, flushed to the disk and then renamed: a kill at any byte leaves what was there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

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
from nbelastic.state.transfer import TENSOR, why_not_plain

FORMAT = 1
MANIFEST = "manifest"
DESCRIPTION = "description"  # the name of the tensor of bytes that holds what is no tensor
_NAME = re.compile(r"(\d{6,})-commit-(\d+)")
_WRITING, _REMOVING = ".writing-", ".removing-"


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint: its size in bytes, and the sha256 of what is in it."""

    size: int
    sha256: str


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: what it is, and where it lies."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int
    length: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint consists of. `tensors`: the description, then the others in the order of their index in it."""

    format: int
    commits: int
    torch: str
    files: dict[str, File]
    tensors: tuple[Entry, ...]


class Snapshot(msgspec.Struct, frozen=True):
    """A state at one commit. The tensors are copies, each with memory of its own; `described` has marks in their place."""

    commits: int
    described: bytes
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]

    def contents(self) -> dict[str, torch.Tensor]:
        """By the names under which they are written."""
        described = torch.frombuffer(bytearray(self.described), dtype=torch.uint8)
        return {DESCRIPTION: described, **dict(zip(self.names, self.tensors, strict=True))}


def names(described: Any) -> tuple[str, ...]:
    """A name for each tensor of a description, made of its place: `modules/model/0.weight`."""
    found: dict[str, None] = {DESCRIPTION: None}
    for place in _places(described, ""):
        name = place
        while name in found:  # a key with a slash in it, or 1 beside "1"
            name += "~"
        found[name] = None
    return tuple(found)[1:]


def _places(described: Any, place: str) -> Iterator[str]:
    if isinstance(described, tuple) and described[:1] == (TENSOR,):
        yield place
    elif isinstance(described, (dict, list, tuple)):
        items = described.items() if isinstance(described, dict) else enumerate(described)
        for key, item in items:
            yield from _places(item, f"{place}/{key}" if place else str(key))


# ---- the folder ----


def listed(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the last written first. Those that are not whole are among them."""
    found = [(int(match[1]), int(match[2]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for *_, path in sorted(found, reverse=True)]


def commits_of(path: Path) -> int:
    """Of one that is `listed`."""
    return int(path.name.rpartition("-")[2])


def is_one(path: Path) -> bool:
    """Whether `path` is a checkpoint, rather than a folder of them."""
    return _NAME.fullmatch(path.name) is not None or (path / MANIFEST).exists()


def prepare(folder: Path) -> None:
    """Make the folder, and see that checkpoints can be written there. StateError if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{_REMOVING}{uuid.uuid4().hex}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise StateError(
            f"checkpoints cannot be written to {folder} ({reason(error)}): give checkpoint another folder."
        ) from None


def tidy(folder: Path, keep: int | None = None) -> None:
    """Remove what kills have left, and all but the last `keep` checkpoints."""
    for path in listed(folder)[keep:] if keep else ():
        with contextlib.suppress(OSError):  # another process is quicker
            path.rename(folder / f"{_REMOVING}{uuid.uuid4().hex}")
    for path in folder.glob(f"{_REMOVING}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"{_WRITING}*"):
        with contextlib.suppress(OSError), _locked(path):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a folder that is being written. BlockingIOError if another process does; its death lets go."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # processes forked meanwhile have the descriptor too
        os.close(descriptor)


# ---- writing ----


def write(folder: Path, snapshot: Snapshot, keep: int) -> Path:
    """Write a checkpoint and remove all but the last `keep`. Raises what the disk raises, and StateError."""
    _read_described(snapshot.described)  # what could not be read back is no checkpoint
    temporary = folder / f"{_WRITING}{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        with _locked(temporary):
            entries = _write_tensors(temporary, snapshot.contents())
            _write_manifest(temporary, snapshot.commits, entries)
            _flush(temporary)
            path = _rename(temporary, folder, snapshot.commits)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _flush(folder)
    tidy(folder, keep)
    return path


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[Entry, ...]:
    """Have torch.distributed.checkpoint write them.

    Its parts are called one by one. `dcp.save` would also look at the default group, which another thread may just be
    taking down, and would warn of being alone; neither goes with a thread beside the training.
    """
    writer = FileSystemWriter(path, sync_files=False, per_thread_copy_ahead=0)
    writer.transforms = _Plain()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, storage_meta=writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    results = writer.write_data(plan, planner).wait()
    writer.finish(metadata, [results])
    lies = {result.index.fqn: result.storage_data for result in results}
    return tuple(
        Entry(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            file=lies[name].relative_path,
            offset=lies[name].offset,
            length=lies[name].length,
        )
        for name, tensor in tensors.items()
    )


class _Plain:
    """Gives torch the file itself for each tensor.

    Torch's own wrapper is a file to Python, which flushes it once more when it is collected. After an error that is when
    the file below is closed: Python 3.13 prints a traceback then.
    """

    def transform_save_stream(self, _item: Any, file: IO[bytes]) -> tuple[_Open, list[str]]:
        return _Open(file), []


class _Open:
    """A file that stays open when torch closes it: the next tensor goes into it too."""

    def __init__(self, file: IO[bytes]) -> None:
        self.write, self.flush = file.write, file.flush

    def close(self) -> None:
        self.flush()


def _write_manifest(path: Path, commits: int, entries: tuple[Entry, ...]) -> None:
    """Flush all files to the disk and write down what they are; torch leaves its last block in a buffer when it does."""
    files = {}
    for file in sorted(path.iterdir()):
        _flush(file)
        files[file.name] = _measure(file)
    line = msgspec.json.encode(Manifest(FORMAT, commits, str(torch.__version__), files, entries))
    with (path / MANIFEST).open("xb") as manifest:
        manifest.write(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")
        manifest.flush()
        os.fsync(manifest.fileno())


def _measure(file: Path) -> File:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()  # lets the training's thread run meanwhile
        return File(opened.tell(), digest)


def _rename(temporary: Path, folder: Path, commits: int) -> Path:
    """To the next number, counted over all that was written here: training may have gone back to an older commit."""
    number = max((int(path.name.partition("-")[0]) for path in listed(folder)), default=0)
    while True:
        number += 1
        path = folder / f"{number:06d}-commit-{commits}"
        try:
            temporary.rename(path)
        except OSError:
            if not path.exists():  # if it does, another process was quicker
                raise
        else:
            return path


def _flush(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading ----


def verify(path: Path) -> Manifest:
    """The manifest of a checkpoint whose every byte is as it was written. StateError says what is wrong."""
    try:
        manifest = _read_manifest(path)
        for name, file in manifest.files.items():
            if "/" in name:
                raise StateError(f"{MANIFEST} names a file outside, {name!r}")
            size = (path / name).stat().st_size
            if size != file.size:
                raise StateError(f"{name} has {size} bytes instead of {file.size}")
            if _measure(path / name) != file:
                raise StateError(f"{name} is damaged: its checksum is another one")
    except OSError as error:
        raise StateError(reason(error)) from None
    return manifest


def _read_manifest(path: Path) -> Manifest:
    if not (path / MANIFEST).exists():
        raise StateError(f"it has no {MANIFEST}")
    raw = (path / MANIFEST).read_bytes()
    line, _, _ = raw.partition(b"\n")
    if raw != line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n":
        raise StateError(f"{MANIFEST} is damaged: its checksum is another one")
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
    """What the state was, with marks in place of the tensors."""
    place = torch.empty(manifest.tensors[0].shape, dtype=torch.uint8)
    read_tensors(path, manifest.tensors[:1], [place])
    described = _read_described(place.numpy().tobytes())
    if not isinstance(described, dict):
        raise StateError(f"its {DESCRIPTION} is of another kind")
    return described


def _read_described(data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # noqa: BLE001  (torch raises many kinds)
        raise StateError(f"the state holds something that is not plain data ({why_not_plain(error)})") from None


def read_tensors(path: Path, entries: Sequence[Entry], places: Sequence[torch.Tensor]) -> None:
    """Put the tensors that `entries` name into `places`. StateError if these have other shapes or types."""
    if len(entries) != len(places):
        raise StateError(f"it has {len(entries)} tensors, and {len(places)} are wanted")
    for entry, place in zip(entries, places, strict=True):
        if (entry.shape, entry.dtype) != (tuple(place.shape), str(place.dtype).removeprefix("torch.")):
            raise StateError(f"{entry.name} is of another shape or type than its description says")
    tensors = {entry.name: place for entry, place in zip(entries, places, strict=True)}
    reader = _Reader(path, entries)
    metadata = reader.read_metadata()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(reader.prepare_global_plan(plans)[0]), planner).wait()


class _Reader(FileSystemReader):  # type: ignore[misc]  # torch carries no types here
    """Knows from the manifest what torch would unpickle from `.metadata`; the tensors are read with `weights_only`."""

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
    """An error of the disk in words; any other with its type."""
    if isinstance(error, StateError):
        return str(error)
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):  # torch's writer hides it
        error = error.__context__
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}".partition("\n")[0]
