"""Functions, arguments and results as bytes: pickled by cloudpickle, with large arrays beside the pickle (PEP 574).

The layout: how many parts, the size of each, then the parts, each at a multiple of `ALIGN` bytes. The first part is the
pickle, the others are its buffers. What is unpickled uses the buffers in place: of a file that is mapped nothing is read
before it is used.
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

ALIGN = 64  # bytes; what vector instructions want
LARGE = 1 << 16  # bytes of a tensor from which on it is put beside the pickle
INLINE = 1 << 16  # bytes of a call or a result that are sent in one message with what it belongs to
PIECE, PIECES = 1 << 18, 16  # bytes in a message to another machine, and messages for which it asks at a time
_NUMBER = struct.Struct("<Q")

Bytes = bytes | bytearray | memoryview | mmap.mmap


def pack(value: object) -> list[memoryview]:
    """Pickle `value`. Returns pieces that make up the layout in this order; arrays are not copied.

    Raises what pickling raises.
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
    """The number of bytes of all pieces together."""
    return sum(piece.nbytes for piece in pieces)


def unpack(data: Bytes) -> Any:
    """The value that `pack` was given. Raises what unpickling raises; ValueError for bytes that `pack` has not made.

    It runs code that `data` names: only for what this cluster's own kernel or workers have sent.
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


def mapped(path: Path) -> mmap.mmap:
    """The bytes of a file, without reading them. Who changes them changes a copy. OSError; ValueError for an empty file."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def pieces(data: bytes | mmap.mmap, offset: int) -> Iterator[tuple[int, bytes]]:
    """The answer to who fetches `data` from `offset` on: the next pieces, each with its own offset."""
    for at in range(offset, min(offset + PIECES * PIECE, len(data)), PIECE):
        yield at, bytes(data[at : at + PIECE])


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, which puts large tensors beside the pickle; torch's own way copies them three times."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and _is_plain(obj):
            flat = obj.detach().reshape(-1).view(torch.uint8).numpy()
            kind = str(obj.dtype).removeprefix("torch.")
            return _tensor, (pickle.PickleBuffer(flat), kind, tuple(obj.shape))
        return super().reducer_override(obj)


def _is_plain(tensor: Any) -> bool:
    """Whether its memory and its shape are all there is to it."""
    if tensor.is_nested or tensor.is_quantized:
        return False
    plain = tensor.layout is sys.modules["torch"].strided and tensor.device.type == "cpu"
    alone = not tensor.requires_grad and not tensor.is_conj() and not tensor.is_neg() and not vars(tensor)
    return plain and alone and tensor.is_contiguous() and tensor.nbytes >= LARGE and tensor.dim() > 0


def _tensor(buffer: Any, kind: str, shape: tuple[int, ...]) -> Any:
    import torch

    flat: Any = torch.frombuffer(buffer, dtype=getattr(torch, kind))
    return flat.reshape(shape)
