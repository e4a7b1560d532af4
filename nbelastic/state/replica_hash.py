"""Hashes of what all ranks hold alike, so that a rank with other values is found: see `driver.replicas`.

At each commit a window of the parameters and of the optimizers' tensors is hashed. The windows take turns, so that a large
state is read once in several commits. Which window comes next depends on the commit and on the tensors' shapes only, so all
ranks hash the same bytes. Each hash continues the one before it: a rank whose values differed once has other hashes from then on. So ranks
can be compared at any later commit.

The sum of a block's 64-bit words changes with every single bit. The sums of the blocks are hashed together, so changes in
different blocks do not cancel.
"""

from __future__ import annotations

import platform
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from hashlib import blake2b
from operator import getitem
from typing import Any, NamedTuple

import torch

from nbelastic.protocol.rank_reports import MOST_HASHES, ReplicaHashes
from nbelastic.state import optimizers
from nbelastic.state.contents import Contents
from nbelastic.worker.formation import Formation

BUDGET = {"cpu": 1 << 20, "cuda": 64 << 20}  # bytes of a window, by device
PIECE = {"cpu": 240 << 10, "cuda": 15 << 19}  # bytes of a tensor that are read at once, at least one row
OVERHEAD = {"cpu": 8 << 10, "cuda": 512 << 10}  # a piece costs as much time as reading so many bytes
BLOCK = {"cpu": 1 << 10, "cuda": 8 << 10}  # words with one sum
SUMMED_ALONE = 8  # blocks; a smaller piece is copied behind others, to be summed in one call
SLOWER = 4  # times
MOST_READINGS = 512  # windows whose views are kept
MOST_PENDING = 64  # commits whose hash a GPU has not computed yet
PLAIN: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)  # a tensor of another class may not have bytes of its own
MOST_KEPT = 4096  # commits whose hash was not sent yet

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class Place(NamedTuple):
    """Where a tensor is found at each commit: itself, or the entry of an optimizer."""

    find: Callable[[], Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    is_slow: bool  # the elements of its parameter are in another order in memory, so reading them takes longer

    def tensor(self) -> torch.Tensor | None:
        """The present tensor; None if it is not like the one that was planned for."""
        found = self.find()
        if not isinstance(found, torch.Tensor):
            return None
        is_like = found.dtype is self.dtype and found.shape == self.shape and found.device.type == self.device
        return found if is_like else None


class Piece(NamedTuple):
    """Rows of a tensor; of a tensor with very long rows: elements. `word`: bytes of the numbers that are summed."""

    place: int
    start: int
    end: int
    is_flat: bool
    word: int


class Plan:
    """The windows of one layout of the state."""

    def __init__(self, contents: Contents) -> None:
        self._names, self._grouped = contents.names, contents.grouped
        self._entries = [(one, one.state, len(one.state)) for one in contents.optimizers()]
        self.places = [*_places(contents)]
        layout = [(place.shape, str(place.dtype), place.device) for place in self.places]
        self.windows = [*_windows(self.places)]
        self.kind = zlib.crc32(repr((layout, _hardware(self.places))).encode())
        self._read: dict[int, Reading] = {}

    def holds(self, contents: Contents) -> bool:
        """Whether the state has the same tensors as before."""
        return (
            contents.names is self._names
            and contents.grouped == self._grouped
            and all(one.state is state and len(state) == count for one, state, count in self._entries)
        )

    def reading(self, commit: int) -> Reading | None:
        """What to read at this commit; None if the tensors are not as planned."""
        number = commit % len(self.windows)
        known = self._read.get(number)
        if known is None or not known.holds():
            known = Reading.make(self.places, self.windows[number])
            if known is not None and len(self._read) < MOST_READINGS:
                self._read[number] = known
        return known


class Reading:
    """Views of the bytes of a window, which hold until a tensor is replaced."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Callable[[], Any], torch.Tensor, int]] = {}  # by place, with the address
        self._lasts = True  # no part is a copy
        self.blocks: dict[str, list[torch.Tensor]] = {}  # by device, 2-dimensional
        self.rests: dict[tuple[str, int], list[torch.Tensor]] = {}  # by device and word

    @classmethod
    def make(cls, places: Sequence[Place], window: Sequence[Piece]) -> Reading | None:
        made = cls()
        for piece in window:
            place = places[piece.place]
            tensor = place.tensor()
            if tensor is None:
                return None
            made._known[piece.place] = place.find, tensor, tensor.data_ptr()
            words = _words(tensor.detach(), piece)
            made._lasts &= words.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            made._add(place.device, words, piece.word)
        return made

    def _add(self, device: str, words: torch.Tensor, word: int) -> None:
        block = BLOCK[device]
        whole = words.numel() // block * block if words.numel() >= SUMMED_ALONE * block else 0
        if whole:
            self.blocks.setdefault(device, []).append(words[:whole].view(-1, block))
        if whole < words.numel():
            self.rests.setdefault((device, word), []).append(words[whole:])

    def holds(self) -> bool:
        """Whether the same tensors are where they were."""
        return self._lasts and all(
            find() is tensor and tensor.data_ptr() == address for find, tensor, address in self._known.values()
        )

    def sums(self, device: str) -> torch.Tensor | None:
        """The sums of all blocks on this device, one after another."""
        found = [each.sum(1) for each in self.blocks.get(device, ())]
        for (where, _), rests in self.rests.items():
            if where == device:
                found += _sums_of(torch.cat(rests), BLOCK[device])
        return torch.cat(found) if found else None


class Pending(NamedTuple):
    """The hash of a commit, of which a GPU still computes a part."""

    commit: int
    sums: bytes  # of the CPU's tensors
    copy: torch.Tensor  # of the GPU's sums, in pinned memory
    event: torch.cuda.Event


class Hashes:
    """The hashes of one generation that were not sent yet. The main thread adds them, the link's thread takes them."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.kind = 0
        self.whole_at = 0  # the first commit at which all windows have been read
        self._last = b""
        self._unsent: deque[tuple[int, int]] = deque(maxlen=MOST_KEPT)

    def add(self, commit: int, sums: bytes) -> None:
        self._last = blake2b(self._last + sums, digest_size=4).digest()
        self._unsent.append((commit, int.from_bytes(self._last, "big")))

    def take(self) -> ReplicaHashes | None:
        """The hashes since the last call, thinned out; None: there are none."""
        found = list[tuple[int, int]]()
        while self._unsent:
            found.append(self._unsent.popleft())
        return ReplicaHashes(self.generation, self.kind, self.whole_at, dict(thinned(found))) if found else None


class ReplicaHash:
    """Hashes the commits of one state."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._plan: Plan | None = None
        self._hashes: Hashes | None = None
        self._pending: deque[Pending] = deque()

    def begin(self, formation: Formation) -> Callable[[], ReplicaHashes | None]:
        """A generation begins. Returns what the link's thread calls for its hashes. A rank without others hashes nothing."""
        self._plan, self._pending, self._hashes = None, deque(), None
        if formation.world_size == 1:
            return lambda: None
        self._hashes = Hashes(formation.generation)
        return self._hashes.take

    def add(self, commit: int) -> None:
        """Hash the state of this commit. On a GPU nothing waits for the hash: a later call finds it."""
        hashes, plan = self._hashes, self._plan
        if hashes is None:
            return
        if plan is None or not plan.holds(self._contents):
            plan = self._plan = Plan(self._contents)
            hashes.kind, hashes.whole_at = plan.kind, commit + len(plan.windows) - 1
        if not plan.windows:
            return
        with torch.no_grad():
            reading = plan.reading(commit)
            if reading is None:  # a tensor was replaced by another kind
                self._plan = None
            else:
                self._read(hashes, commit, reading)

    def _read(self, hashes: Hashes, commit: int, reading: Reading) -> None:
        on_cpu, on_gpu = reading.sums("cpu"), reading.sums("cuda")
        sums = on_cpu.numpy().tobytes() if on_cpu is not None else b""
        while self._pending and (self._pending[0].event.query() or len(self._pending) >= MOST_PENDING):
            self._finish_oldest(hashes)
        if on_gpu is None and not self._pending:
            hashes.add(commit, sums)
            return
        copy = torch.empty(0 if on_gpu is None else len(on_gpu), dtype=torch.int64, pin_memory=True)
        if on_gpu is not None:
            copy.copy_(on_gpu, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append(Pending(commit, sums, copy, event))

    def _finish_oldest(self, hashes: Hashes) -> None:
        oldest = self._pending.popleft()
        oldest.event.synchronize()
        hashes.add(oldest.commit, oldest.sums + oldest.copy.numpy().tobytes())


def thinned(found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """At most `MOST_HASHES` commits: the multiples of a power of two, so that all ranks choose some alike."""
    step = 1
    while len(found) > MOST_HASHES:
        step *= 2
        found = [pair for pair in found if pair[0] % step == 0]
    return found


def _places(contents: Contents) -> Iterator[Place]:
    """In an order that is the same on all ranks: that of an optimizer's entries is not."""
    for parameter in contents.names:
        yield from _place(lambda p=parameter: p, parameter)  # type: ignore[misc]
    for optimizer in contents.optimizers():
        known = optimizer.state
        for parameter in optimizers.parameters(optimizer):
            for path in _paths(known.get(parameter), (parameter,)):
                yield from _place(partial(_entry, known, path), parameter)


def _paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each tensor in dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield path
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _paths(value[key], (*path, key))
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _paths(item, (*path, index))


def _entry(known: Any, path: tuple[Any, ...]) -> Any:
    """The present value there, or None. `known` is the optimizer's state, which would make an entry for a parameter without one."""
    try:
        return reduce(getitem, path, known) if path[0] in known else None
    except (LookupError, TypeError):
        return None


def _place(find: Callable[[], Any], parameter: torch.Tensor) -> Iterator[Place]:
    tensor = find()
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return
    if tensor.device.type in BUDGET and tensor.numel() and not tensor.is_quantized and not tensor.is_conj():
        yield Place(find, tuple(tensor.shape), tensor.dtype, tensor.device.type, not parameter.is_contiguous())


def _pieces(number: int, place: Place) -> Iterator[tuple[Piece, int]]:
    """The pieces of a tensor, and the bytes of each."""
    count, most = torch.Size(place.shape).numel(), PIECE[place.device]
    rows = place.shape[0] if place.shape else 1
    is_flat = not place.shape or count // rows * place.dtype.itemsize > most
    size = place.dtype.itemsize * (1 if is_flat else count // rows)
    total = count if is_flat else rows
    step = max(1, most // size)
    for start in range(0, total, step):
        end = min(total, start + step)
        nbytes = (end - start) * size
        word = next(each for each, _ in _WORDS if nbytes % each == 0)
        yield Piece(number, start, end, is_flat, word), nbytes


def _windows(places: Sequence[Place]) -> Iterator[list[Piece]]:
    window, cost = list[Piece](), 0.0
    for number, place in enumerate(places):
        for piece, nbytes in _pieces(number, place):
            share = (nbytes * (SLOWER if place.is_slow else 1) + OVERHEAD[place.device]) / BUDGET[place.device]
            if window and cost + share > 1:
                yield window
                window, cost = [], 0.0
            window.append(piece)
            cost += share
    if window:
        yield window


def _words(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The bytes of a piece as numbers, in the order of its elements, whatever their order in memory."""
    flat = tensor.reshape(-1)[piece.start : piece.end] if piece.is_flat else tensor[piece.start : piece.end].reshape(-1)
    dtype = dict(_WORDS)[piece.word]
    is_odd = flat.data_ptr() % piece.word or flat.storage_offset() * flat.element_size() % piece.word
    if is_odd or flat.stride(0) != 1:  # a column of a larger tensor has gaps
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).view(dtype)


def _sums_of(words: torch.Tensor, block: int) -> list[torch.Tensor]:
    whole = words.numel() // block * block
    found = [words[:whole].view(-1, block).sum(1)] if whole else []
    return [*found, words[whole:].sum().view(1)] if whole < words.numel() else found


def _hardware(places: Sequence[Place]) -> tuple[str, ...]:
    """What two ranks must have alike to compute the same bits. A norm on a CPU depends on the number of threads."""
    device = places[0].device if places else ""
    if device == "cuda":
        return torch.__version__, torch.cuda.get_device_name()
    capability = torch.backends.cpu.get_cpu_capability()
    return torch.__version__, platform.machine(), capability, str(torch.get_num_threads())
