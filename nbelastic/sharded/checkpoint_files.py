"""One checkpoint of a sharded state on disk: the format is that of `torch.distributed.checkpoint`.

All ranks write into one temporary folder of a shared file system: each its own file, and then a small *part*, which lists
the chunks in it. Rank 0 waits for all parts, writes `.metadata`, and renames the folder. So a checkpoint is either complete or
not there. The folder's name is that of other checkpoints: see `state.checkpoint_files`.
"""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from nbelastic.errors import StateError
from nbelastic.sharded.chunks import Chunk, Parameter, owners_of
from nbelastic.state.checkpoint_checksums import File, measured, write_sealed
from nbelastic.state.checkpoint_files import REMOVING, flush, reason, rename, tidy
from nbelastic.state.checkpoint_streams import StreamTransform

METADATA = ".metadata"
CHECKSUMS = "checksums"  # of all files, by name: torch does not notice changed bytes
PARTS = ".parts-"  # begins the names of temporary folders
POLL = 0.05  # seconds between two looks for parts
SIGN = 1.0  # seconds between two signs that a rank is still writing
STALE = 24 * 3600.0  # seconds after which a temporary folder of another job is removed


class Written(msgspec.Struct, frozen=True):
    """Where a chunk, or a whole value (`offsets` is None), was written: a file, and bytes in it."""

    key: str
    offsets: tuple[int, ...] | None
    file: str
    offset: int
    length: int


class Part(msgspec.Struct, frozen=True):
    """What one rank has written, with the checksums of its files; `error`: why it has not."""

    written: tuple[Written, ...] = ()
    files: dict[str, File] = {}
    error: str = ""


# ---- every rank ----


def writer_of(number: int, chunks: Sequence[Chunk | None]) -> dict[Chunk, int]:
    """For each chunk of the parameter with this number the rank that writes it: its owners take turns."""
    return {chunk: sorted(ranks)[number % len(ranks)] for chunk, ranks in owners_of(chunks).items()}


def chunks_to_write(parameters: Mapping[str, Parameter], rank: int) -> dict[str, Chunk]:
    """The parameters of which `rank` writes its chunk."""
    found = {}
    for number, (name, parameter) in enumerate(parameters.items()):
        chunk = parameter.chunks[rank]
        if chunk is not None and writer_of(number, parameter.chunks)[chunk] == rank:
            found[name] = chunk
    return found


class Shards(msgspec.Struct, frozen=True):
    """What one rank writes: chunks by key, each with the whole tensor's shape; and whole values by key."""

    chunks: dict[str, tuple[Any, Chunk, tuple[int, ...]]]  # (the local tensor, its chunk, the whole tensor's shape)
    whole: dict[str, Any]


def write_part(temporary: Path, rank: int, shards: Shards) -> None:
    """Write this rank's file and its part. Raises OSError and others; then the part has the reason."""
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        with _signs(temporary / f"part-{rank}.signs"):
            written = _write_values(temporary, rank, shards)
            part = Part(written, {name: measured(temporary / name) for name in {one.file for one in written}})
    except Exception as error:
        write_failure(temporary, rank, error)
        raise
    _put(temporary, rank, part)


@contextlib.contextmanager
def _signs(path: Path) -> Iterator[None]:
    """Let a small file grow meanwhile: while a large one is flushed, it does not grow, and rank 0 must not give up."""
    done = threading.Event()

    def grow() -> None:
        with contextlib.suppress(OSError):  # the disk is full, or rank 0 has removed the folder
            while not done.wait(SIGN):
                with path.open("ab") as file:
                    file.write(b".")

    thread = threading.Thread(target=grow, name="nbelastic-checkpoint-signs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def write_failure(temporary: Path, rank: int, error: Exception) -> None:
    """Report to rank 0 that there will be no part of this rank."""
    with contextlib.suppress(OSError):
        temporary.mkdir(parents=True, exist_ok=True)
        _put(temporary, rank, Part(error=reason(error)))


def _put(temporary: Path, rank: int, part: Part) -> None:
    """Write a part under its name when it is complete."""
    whole = temporary / f"part-{rank}"
    unfinished = whole.with_suffix(".unfinished")
    unfinished.write_bytes(msgspec.json.encode(part))
    flush(unfinished)
    unfinished.rename(whole)


def _write_values(temporary: Path, rank: int, shards: Shards) -> tuple[Written, ...]:
    writer = FileSystemWriter(temporary, sync_files=False, per_thread_copy_ahead=0)
    writer.transforms = StreamTransform()
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(shards.whole, storage_meta=writer.storage_meta(), is_coordinator=True)
    items = list(planner.create_local_plan().items)
    for key, (tensor, chunk, shape) in shards.chunks.items():
        planner.chunks[key] = tensor
        data = TensorWriteData(_stored(chunk), TensorProperties(dtype=tensor.dtype), torch.Size(shape))
        items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    results = writer.write_data(SavePlan(items, storage_data=_StoragePrefix(f"__{rank}_")), planner).wait()
    for file in {result.storage_data.relative_path for result in results}:
        flush(temporary / file)
    return tuple(_written(result) for result in results)


def _written(result: WriteResult) -> Written:
    offsets, place = result.index.offset, result.storage_data
    return Written(
        result.index.fqn,
        None if offsets is None else tuple(offsets),
        place.relative_path,
        place.offset,
        place.length,
    )


class _Planner(DefaultSavePlanner):
    """Finds the local tensor of each chunk: torch would look for a DTensor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.chunks: dict[str, torch.Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.chunks[index.fqn] if index.fqn in self.chunks else super().lookup_object(index)


def _stored(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


# ---- rank 0 ----


def sharded_metadata(parameter: Parameter, dtype: str) -> TensorStorageMetadata:
    """How the `.metadata` of a checkpoint describes a tensor that is split as `parameter` is."""
    chunks = [_stored(chunk) for chunk in owners_of(parameter.chunks)]
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, dtype)), torch.Size(parameter.shape), chunks)


def whole_metadata(value: Any) -> STORAGE_TYPES:
    """The same for a value that one rank writes: a tensor or any other."""
    if not isinstance(value, torch.Tensor):
        return BytesStorageMetadata()
    start = torch.Size([0] * value.dim())
    return TensorStorageMetadata(
        TensorProperties(dtype=value.dtype), value.shape, [ChunkStorageMetadata(start, value.shape)]
    )


def collect(temporary: Path, size: int, patience: Callable[[], float]) -> list[Part]:
    """Wait for the parts of all `size` ranks.

    StateError if a rank could not write its part, or if nothing has grown in the folder for `patience()` seconds.
    """
    parts: dict[int, Part] = {}
    seen: Any = None
    since = time.monotonic()
    while True:
        sizes = _sizes(temporary)  # opens the folder: NFS would not show new names for a while
        for rank in range(size):
            path = temporary / f"part-{rank}"
            if rank not in parts and path.name in sizes:
                parts[rank] = msgspec.json.decode(path.read_bytes(), type=Part)
                if parts[rank].error:
                    raise StateError(f"rank {rank} could not write its part: {parts[rank].error}")
        if len(parts) == size:
            return [parts[rank] for rank in range(size)]
        if sizes != seen:
            seen, since = sizes, time.monotonic()
        if time.monotonic() - since > patience():
            missing = ", ".join(str(rank) for rank in range(size) if rank not in parts)
            raise StateError(
                f"the parts of ranks {missing} have not come: they have ended, or do not share this folder"
            )
        time.sleep(POLL)


def _sizes(folder: Path) -> dict[str, int]:
    found = {}
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # it was renamed
            found[path.name] = path.stat().st_size
    return found


def finish(
    temporary: Path,
    name: tuple[Path, int, int],
    metadata: Metadata,
    written_as: Mapping[str, str],
    parts: Sequence[Part],
) -> Path:
    """Write `.metadata` and the checksums, and rename the folder. StateError if a chunk is missing. `name`: parent folder, commit, number.

    `written_as`: for each further key of a parameter that layers share, the key under which it was written.
    """
    storage = {}
    for part in parts:
        for one in part.written:
            storage[MetadataIndex(one.key, one.offsets)] = _StorageInfo(one.file, one.offset, one.length)
    writer = FileSystemWriter(temporary, sync_files=True)
    results = []
    for key, described in metadata.state_dict_metadata.items():
        first = written_as.get(key, key)
        for offsets in _offsets(described):
            place = storage.get(MetadataIndex(first, offsets))
            if place is None:
                raise StateError(f"no rank has written {key} from {tuple(offsets or ())}")
            results.append(WriteResult(MetadataIndex(key, offsets), place.length, place))
    writer.finish(metadata, [results])
    files = {name: file for part in parts for name, file in part.files.items()}
    write_sealed(temporary / CHECKSUMS, msgspec.json.encode({**files, METADATA: measured(temporary / METADATA)}))
    for path in temporary.glob("part-*"):
        path.unlink()
    flush(temporary)
    path = rename(temporary, *name)
    flush(name[0])
    return path


def _offsets(described: STORAGE_TYPES) -> list[torch.Size | None]:
    if isinstance(described, TensorStorageMetadata):
        return [chunk.offsets for chunk in described.chunks]
    return [None]


def remove_old(folder: Path, keep: int, unfinished: Sequence[str] = ()) -> None:
    """Remove all but the newest `keep` checkpoints, and temporary folders.

    That is those whose names begin as one of `unfinished`, and those that no process has used for a day.
    """
    now = time.time()
    for path in folder.glob(f"{PARTS}*"):
        with contextlib.suppress(OSError):
            if path.name.startswith(tuple(unfinished)) or now - path.stat().st_mtime > STALE:
                path.rename(folder / f"{REMOVING}{uuid.uuid4().hex}")
    tidy(folder, keep)
