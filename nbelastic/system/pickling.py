"""Functions, arguments and results as bytes: cloudpickle, with large arrays beside the pickle (PEP 574).

The layout: the number of parts, the size of each, then the parts, each at a multiple of `ALIGN` bytes. The first part is
the pickle, the others are its buffers. Unpickled arrays use the buffers in place: a mapped file is read when an array is
used.
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

ALIGN = 64  # bytes, for vector instructions
LARGE = 1 << 16  # bytes; a tensor of this size or more is put beside the pickle
INLINE = 1 << 16  # bytes; a call or result up to this size is sent within its program or result message
PIECE, PIECES = 1 << 18, 16  # bytes per message to another machine, and messages per request for them
IN_MEMORY = 1 << 26  # bytes; a result up to this size is kept in memory if the disk is full
_NUMBER = struct.Struct("<Q")

Bytes = bytes | bytearray | memoryview | mmap.mmap


def pack(value: object) -> list[memoryview]:
    """Pickle `value`. Returns the pieces of the layout, in order; arrays are not copied.

    Raises the errors of pickling.
    """
    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as file:
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
        parts = [memoryview(file.getvalue()), *(buffer.raw() for buffer in buffers)]
    head = b"".join(map(_NUMBER.pack, [len(parts), *(part.nbytes for part in parts)]))
    pieces = []
    for part in (memoryview(head), *parts):
        pieces.append(part)
        if part.nbytes % ALIGN:
            pieces.append(memoryview(bytes(ALIGN - part.nbytes % ALIGN)))
    return pieces


def size(pieces: Iterable[memoryview]) -> int:
    """The number of bytes in all pieces together."""
    return sum(piece.nbytes for piece in pieces)


def unpack(data: Bytes) -> Any:
    """Restore the value that `pack` was given. ValueError for bytes that `pack` has not made; errors of unpickling.

    Unpickling runs code: `data` must come from this cluster's own kernel or workers.
    """
    view = memoryview(data)
    parts, at = [], 0
    try:
        (count,) = _NUMBER.unpack_from(view)
        sizes = struct.unpack_from(f"<{count}Q", view, _NUMBER.size)
    except (struct.error, MemoryError):
        raise ValueError("this is not a packed value") from None
    if not sizes:
        raise ValueError("this is not a packed value")
    for length in ((1 + count) * _NUMBER.size, *sizes):
        parts.append(view[at : at + length])
        if parts[-1].nbytes != length:
            raise ValueError("this is a part of a packed value")
        at += length + -length % ALIGN
    return pickle.loads(parts[1], buffers=parts[2:])  # noqa: S301  (see above)


def no_space(what: str, size: int, folder: Path, why: str) -> str:
    """The error for a value that the disk has no space for."""
    return f"OSError: {what} ({size / 1e6:,.1f} MB) cannot be saved in {folder}: {why}; free some space there"


def mapped(path: Path) -> mmap.mmap:
    """Map a file copy-on-write: changes do not reach the file. OSError; ValueError for an empty file."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def pieces(data: bytes | mmap.mmap, offset: int) -> Iterator[tuple[int, bytes]]:
    """The next pieces of `data` from `offset` on, each with its offset: the answer to one request."""
    for at in range(offset, min(offset + PIECES * PIECE, len(data)), PIECE):
        yield at, bytes(data[at : at + PIECE])


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that puts large tensors beside the pickle; torch's own reducer copies them three times."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and _is_plain(obj):
            flat = obj.detach().reshape(-1).view(torch.uint8).numpy()
            kind = str(obj.dtype).removeprefix("torch.")
            return _tensor, (pickle.PickleBuffer(flat), kind, tuple(obj.shape))
        return super().reducer_override(obj)


def _is_plain(tensor: Any) -> bool:
    """Whether the tensor's memory, type and shape describe it completely."""
    if tensor.is_nested or tensor.is_quantized:
        return False
    plain = tensor.layout is sys.modules["torch"].strided and tensor.device.type == "cpu"
    alone = not tensor.requires_grad and not tensor.is_conj() and not tensor.is_neg() and not vars(tensor)
    return plain and alone and tensor.is_contiguous() and tensor.nbytes >= LARGE and tensor.dim() > 0


def _tensor(buffer: Any, kind: str, shape: tuple[int, ...]) -> Any:
    import torch

    flat: Any = torch.frombuffer(buffer, dtype=getattr(torch, kind))
    return flat.reshape(shape)
