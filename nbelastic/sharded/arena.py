"""Memory for copies of a shard, which the other workers of the host can map: it outlives the process that filled it.

Each arena is allocated once, as allocating takes longer than copying. It is a file without a name (`memfd`): the system
frees it when the last process that has mapped it ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nbelastic.errors import StateError
from nbelastic.sharded.whole_commits import Commit
from nbelastic.state.memory import free_on_machine
from nbelastic.state.tensor_snapshot import copy_all

ALIGNMENT = 64  # bytes
HEADER = 64  # bytes before the tensors: the generation and number of the commit
NO_COMMIT = (-1, -1)
CUDA_SUCCESS = 0
MEMORY_NAME = "nbelastic-copy"


class ShardTensor(NamedTuple):
    """A tensor of the sharded state: a parameter, or the `entry` that an optimizer keeps for it."""

    parameter: str
    optimizer: str = ""
    entry: str = ""
    dtype: str = "float32"

    @property
    def key(self) -> str:
        """Its name in errors and checkpoints."""
        return f"{self.optimizer}.{self.parameter}.{self.entry}" if self.optimizer else self.parameter


Shard = dict[ShardTensor, torch.Tensor]


class Arena:
    """Space for one shard: `tensors` are views of it. Without `fd` it is new memory, else the memory of that descriptor.

    `processes` processes of this machine may allocate one at the same time. StateError if there is not enough memory.
    """

    def __init__(
        self,
        names: Sequence[ShardTensor],
        shapes: Sequence[tuple[int, ...]],
        fd: int = -1,
        *,
        pinned: bool = False,
        processes: int = 1,
    ) -> None:
        dtypes = [getattr(torch, name.dtype) for name in names]
        lengths = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        padded = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
        self.nbytes = HEADER + sum(padded)
        if fd < 0:
            check_memory(self.nbytes, processes)
        self._map, self.fd = _map(self.nbytes, fd)
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned_at = pin(memory) if pinned else 0
        self._header = memory[:16].view(torch.int64)
        self.block = memory[HEADER:]  # all tensors, as one piece that is sent
        self.tensors: Shard = {
            name: part[:length].view(dtype).view(shape)
            for name, shape, dtype, length, part in zip(
                names, shapes, dtypes, lengths, self.block.split(padded), strict=True
            )
        }
        if fd < 0:
            self.unseal()

    @property
    def commit(self) -> Commit | None:
        """The commit of which all of it is; None while it is written."""
        found = tuple(self._header.tolist())
        return None if min(found) < 0 else Commit(*found)  # one number may be written, and the other not yet

    def unseal(self) -> None:
        """Call it before the memory is written."""
        self._header.copy_(torch.tensor(NO_COMMIT))

    def seal(self, commit: Commit) -> None:
        """Call it when all of the memory is of this commit."""
        self._header.copy_(torch.tensor((commit.generation, commit.number)))

    def fill(self, shard: Shard, commit: Commit) -> None:
        """Copy `shard` into this memory, and wait until it is there: other threads and processes read it."""
        self.unseal()
        sources = [shard[name] for name in self.tensors]
        copy_all(sources, to=list(self.tensors.values()))
        for device in {source.device for source in sources if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self.seal(commit)

    def __del__(self) -> None:
        if getattr(self, "_pinned_at", 0):  # before the memory: CUDA would take what is mapped there next for pinned
            unpin(self._pinned_at)
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


def pin(memory: torch.Tensor) -> int:
    """Let the GPU copy into this memory directly; returns its address for `unpin`. 0: it cannot, so copies are slower.

    All of it at once: a copy must not reach from one registered part into another.
    """
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == CUDA_SUCCESS:
        return int(memory.data_ptr())
    with contextlib.suppress(RuntimeError):  # CUDA reports the failure once more, to the next launch of a kernel
        torch.zeros(1, device="cuda")
    return 0


def unpin(address: int) -> None:
    """The inverse of `pin`."""
    torch.cuda.cudart().cudaHostUnregister(address)


def check_memory(size: int, processes: int) -> None:
    """StateError if `processes` processes cannot allocate `size` bytes each: the system would kill one of them."""
    try:
        free = free_on_machine()
    except (OSError, ValueError, KeyError):  # this machine does not show its memory
        return
    if size * processes > free:
        raise StateError(
            f"a copy of this rank's shard takes {size / 1e6:,.0f} MB, {processes} ranks of this host need one now, and "
            f"{free / 1e6:,.0f} MB are free there: use more hosts, or ShardedState(copies=0), which copies nothing."
        )


def _map(size: int, fd: int) -> tuple[mmap.mmap, int]:
    """The memory, and the descriptor that others open; -1 if it is another process's. Raises OSError."""
    if fd >= 0:
        return mmap.mmap(fd, size), -1
    fd = os.memfd_create(MEMORY_NAME)
    try:
        os.posix_fallocate(
            fd, 0, size
        )  # raises if there is not enough; a write to missing memory would end the process
        return mmap.mmap(fd, size), fd
    except OSError:
        os.close(fd)
        raise


class Arenas:
    """Two arenas of one shard, used in turn: while one is filled or sent, the other has the last whole commit."""

    def __init__(
        self,
        names: Sequence[ShardTensor],
        shapes: Sequence[tuple[int, ...]],
        *,
        pinned: bool = False,
        processes: int = 1,
    ) -> None:
        self.names, self._shapes, self._pinned, self._processes = tuple(names), tuple(shapes), pinned, processes
        self.made: list[Arena] = []
        self._next = 0

    def take(self) -> Arena:
        """The arena to fill now: not the one that was taken last."""
        if len(self.made) < 2:
            self.made.append(Arena(self.names, self._shapes, pinned=self._pinned, processes=self._processes))
            return self.made[-1]
        self._next = 1 - self._next
        return self.made[1 - self._next]

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(arena.nbytes for arena in self.made)
