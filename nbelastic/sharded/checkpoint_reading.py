"""Reads checkpoints of `torch.distributed.checkpoint`: those of nbelastic and of others, as data, never as code.

`.metadata` is a pickle. It is read with the few classes that torch's own writers put into it, and no others. It may
not change these classes.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import IO, Any, ClassVar

import msgspec
import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nbelastic.errors import StateError
from nbelastic.sharded.checkpoint_files import CHECKSUMS, METADATA
from nbelastic.sharded.chunks import Chunk
from nbelastic.state.checkpoint_checksums import File, check_file, read_sealed
from nbelastic.state.checkpoint_files import listed, reason
from nbelastic.state.checkpoints import first_usable

RECORD = "nbelastic"  # the key of what no other value of a checkpoint says: counters, samplers, names
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}

DAMAGED = (  # what a damaged pickle raises
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OverflowError,
    RuntimeError,
    SystemError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)


class _Unpickler(pickle._Unpickler):
    """The one that is written in Python: the faster one lets a pickle set attributes of classes, such as methods of `Path`."""

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type | FunctionType | Enum):  # type: ignore[attr-defined]
            raise StateError(f"its {METADATA} changes a class, and is not read")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # the name in Python 3.13, which others may not have
            module = "pathlib"
        kind = getattr(torch, name, None) if module == "torch" else None
        if name in ALLOWED.get(module, ()) or kind is torch.Size or isinstance(kind, torch.dtype):
            return super().find_class(module, name)
        raise StateError(f"its {METADATA} has {module}.{name}, which is not read")


class Stored:
    """A complete checkpoint. StateError if it cannot be read, or if a file of it is missing or too short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with (path / METADATA).open("rb") as file:
                metadata = _Unpickler(file).load()
            if not isinstance(metadata, Metadata) or not metadata.storage_data:
                raise StateError(f"its {METADATA} does not describe a checkpoint")
            self._metadata = metadata
            ends: dict[str, int] = {}
            for place in metadata.storage_data.values():
                ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
            for name, end in ends.items():
                if "/" in name:
                    raise StateError(f"it names a file outside, {name!r}")
                size = (path / name).stat().st_size
                if size < end:
                    raise StateError(f"{name} has {size} bytes instead of {end}")
        except OSError as error:
            raise StateError(reason(error)) from None
        except DAMAGED as error:
            raise StateError(f"its {METADATA} is damaged ({reason(error)})") from None

    @property
    def keys(self) -> Mapping[str, Any]:
        """How each key is stored: a tensor with its chunks, or another value."""
        return self._metadata.state_dict_metadata  # type: ignore[no-any-return]

    @property
    def has_record(self) -> bool:
        """Whether nbelastic has written it."""
        return RECORD in self.keys

    def shape(self, key: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None if it is another value."""
        one = self.keys[key]
        return tuple(one.size) if isinstance(one, TensorStorageMetadata) else None

    def dtype(self, key: str) -> str:
        """The type of a tensor's numbers."""
        return str(self.keys[key].properties.dtype).removeprefix("torch.")

    def values(self, keys: Iterable[str]) -> dict[str, Any]:
        """Values that are not split over ranks: read whole, on the CPU. Any but plain data is refused."""
        found: dict[str, Any] = {}
        items, targets = [], {}
        for key in keys:
            shape = self.shape(key)
            if shape is not None:
                found[key] = targets[key] = torch.empty(shape, dtype=self.keys[key].properties.dtype)
                items += self._items(key, Chunk((0,) * len(shape), shape))
            else:
                index, none = MetadataIndex(key), torch.Size((0,))
                items.append(ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none))
        planner = _Planner(targets)
        self._read(items, planner)
        return {**found, **planner.values}

    def record(self) -> dict[str, Any]:
        """What nbelastic has written beside the tensors. StateError if it is damaged."""
        record = self.values([RECORD])[RECORD]
        if not isinstance(record, dict) or not isinstance(record.get("commits"), int):
            raise StateError(f"{RECORD} in it is not a record")
        return record

    def fill(self, wanted: Iterable[tuple[str, torch.Tensor, Chunk | None]]) -> None:
        """Read chunks into local tensors, however the checkpoint is split. StateError if one cannot be read."""
        items, targets = [], {}
        for key, target, chunk in wanted:
            if chunk is not None:
                targets[key] = target
                items += self._items(key, chunk)
        self._read(items, _Planner(targets))

    def _items(self, key: str, chunk: Chunk) -> list[ReadItem]:
        target = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        items = create_read_items_for_chunk_list(key, self.keys[key], [target])
        if sum(item.lengths.numel() for item in items) < chunk.numel:
            raise StateError(f"{key} is not whole in {self.path}")
        return list(items)

    def _read(self, items: list[ReadItem], planner: _Planner) -> None:
        reader = FileSystemReader(self.path)
        reader.set_up_storage_reader(self._metadata, True)
        try:
            reader.read_data(LoadPlan(items), planner).wait()
        except StateError:
            raise
        except Exception as error:  # noqa: BLE001  (torch raises many kinds)
            raise StateError(f"{self.path} cannot be read ({reason(error)})") from None


def check_files(path: Path, number: int = 0, processes: int = 1) -> None:
    """StateError if a file is not as it was written. So many `processes` check some each; this one has this `number`.

    Checkpoints of other programs, and of older versions, have no checksums.
    """
    try:
        if (path / CHECKSUMS).exists():
            files = msgspec.json.decode(read_sealed(path / CHECKSUMS), type=dict[str, File])
            for name in sorted(files)[number::processes]:
                check_file(path, name, files[name])
    except (OSError, msgspec.MsgspecError) as error:
        raise StateError(reason(error)) from None


class _Planner:
    """Where torch's reader puts what it reads."""

    def __init__(self, targets: Mapping[str, torch.Tensor]) -> None:
        self._targets = targets
        self.values: dict[str, Any] = {}

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        target = self._targets[item.dest_index.fqn].detach()
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do: the tensor is a view of its target."""

    def load_bytes(self, item: ReadItem, value: IO[bytes]) -> None:
        key = item.dest_index.fqn
        try:
            self.values[key] = torch.load(io.BytesIO(value.read()), weights_only=True, map_location="cpu")
        except Exception as error:  # noqa: BLE001  (torch raises many kinds)
            raise StateError(f"{key} cannot be read, or is not plain data ({reason(error)})") from None


def newest(folder: Path, refused: Mapping[Path, str] = {}) -> Stored | None:
    """The newest complete checkpoint of nbelastic in `folder`; None: there is none. StateError if none can be used.

    `refused`: why not, by path, of those whose files are damaged.
    """

    def use(path: Path) -> Stored:
        if path in refused:
            raise StateError(refused[path])
        return _with_record(path)

    try:
        known = [path for path in listed(folder) if (path / METADATA).exists()]
    except OSError as error:
        raise StateError(f"there is no checkpoint in {folder} ({reason(error)}).") from None
    return first_usable(folder, known, use)


def _with_record(path: Path) -> Stored:
    stored = Stored(path)
    if not stored.has_record:
        raise StateError("it is not of a ShardedState")
    stored.record()
    return stored


def find(path: Path) -> Stored:
    """The checkpoint at `path`, or the newest of a folder of them. StateError if there is none."""
    if (path / METADATA).exists():
        try:
            return Stored(path)
        except StateError as error:
            raise StateError(f"the checkpoint {path} cannot be used: {str(error).rstrip('.')}.") from None
    stored = newest(path) if path.is_dir() else None
    if stored is None:
        raise StateError(f"there is no checkpoint in {path}: it has no {METADATA}, and no folder with one.")
    return stored
