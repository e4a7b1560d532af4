"""Pickled functions, arguments and results: they are restored exactly, and large arrays are not copied."""

from __future__ import annotations

import resource
import stat
import struct

import numpy as np
import pytest
import torch

from nbelastic.system import pickling
from nbelastic.system.private_files import replace_private

LARGE = pickling.LARGE  # bytes


def packed(value: object) -> bytearray:
    return bytearray(b"".join(pickling.pack(value)))


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64, torch.float8_e4m3fn], ids=str
)
def test_a_large_tensor_is_restored(kind):
    """Of every type, with its shape, and writable; its bytes are beside the pickle."""
    tensor = torch.arange(LARGE).remainder(2).reshape(4, -1).to(kind)
    pieces = pickling.pack({"one": tensor})
    assert any(piece.nbytes == tensor.nbytes for piece in pieces)
    found = pickling.unpack(bytearray(b"".join(pieces)))["one"]
    assert (found.dtype, found.shape) == (kind, tensor.shape)
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    found.zero_()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(LARGE).t(),
        torch.zeros(300, 300).t(),
        torch.zeros(300, 300)[:, :100],
        torch.zeros(LARGE, requires_grad=True),
        torch.nn.Parameter(torch.zeros(LARGE)),
        torch.zeros(300, 300).to_sparse(),
        torch.zeros(LARGE, dtype=torch.complex64).conj(),
        torch.tensor(3.0),
        torch.zeros(0),
    ],
    ids=["flat", "turned", "part", "leaf", "parameter", "sparse", "conjugate", "scalar", "empty"],
)
def test_special_tensors_are_restored(tensor):
    """Tensors with more than memory, type and shape use torch's own reducer."""
    found = pickling.unpack(packed(tensor))
    assert (type(found), found.requires_grad) == (type(tensor), tensor.requires_grad)
    assert torch.equal(found.to_dense(), tensor.to_dense())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_restored():
    tensor = torch.nested.nested_tensor([torch.zeros(LARGE), torch.ones(LARGE)])
    found = pickling.unpack(packed(tensor))
    assert all(torch.equal(*pair) for pair in zip(found.unbind(), tensor.unbind(), strict=True))


def test_arrays_are_neither_copied_nor_shared(tmp_path):
    """A mapped file is read when it is used. Writing into an array changes neither the file nor another array."""
    array = np.arange(100_000.0)
    pieces = pickling.pack((array, "and more"))
    assert any(piece.obj is not None and np.shares_memory(np.frombuffer(piece, np.uint8), array) for piece in pieces)
    path = tmp_path / "value"
    replace_private(path, pieces)
    one, _ = pickling.unpack(pickling.mapped(path))
    other, text = pickling.unpack(pickling.mapped(path))
    one[0] = 7.0
    assert (other[0], one[0], text) == (0.0, 7.0, "and more")
    assert np.array_equal(other, array)


def test_a_written_value_is_private_and_whole(tmp_path):
    """Mode 0600; a process that has mapped the earlier file keeps it."""
    path = tmp_path / "value"
    replace_private(path, pickling.pack("before" * LARGE))
    before = pickling.mapped(path)
    replace_private(path, pickling.pack("after"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert pickling.unpack(before) == "before" * LARGE
    assert pickling.unpack(pickling.mapped(path)) == "after"
    assert [file.name for file in tmp_path.iterdir()] == ["value"]


def test_a_full_disk_leaves_nothing(tmp_path):
    """The error is the system's, and the earlier file remains."""
    (tmp_path / "value").write_text("before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # has the effect of a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            replace_private(tmp_path / "value", pickling.pack("x" * LARGE))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("value", "before")]


def test_incomplete_data_is_refused():
    """Before any of it is unpickled."""
    whole = packed(np.zeros(1000))
    for cut in (0, 7, 8, 30, 100, len(whole) // 2):
        with pytest.raises(ValueError, match="packed value"):
            pickling.unpack(whole[:cut])
    for junk in (bytes(8), b"\xff" * 64, struct.pack("<QQ", 1, 1 << 60)):
        with pytest.raises(ValueError, match="packed value"):
            pickling.unpack(junk)


def test_pieces_of_a_value():
    """As many as one request returns, with their offsets; the last one is shorter."""
    data = bytes(range(256)) * (pickling.PIECE * (pickling.PIECES + 1) // 256) + b"end"
    first = list(pickling.pieces(data, 0))
    assert [at for at, _ in first] == [number * pickling.PIECE for number in range(pickling.PIECES)]
    rest = list(pickling.pieces(data, pickling.PIECE * pickling.PIECES))
    assert b"".join(piece for _, piece in first + rest) == data
    assert list(pickling.pieces(data, len(data))) == []


def test_a_notebooks_class_is_pickled_by_value():
    """Its instances are restored as instances of the same class."""
    namespace = {"__name__": "__main__"}
    exec("class Point:\n    def __init__(self, x):\n        self.x = x", namespace)
    kind = namespace["Point"]
    there = packed(kind(3))
    assert isinstance(pickling.unpack(there), kind)
