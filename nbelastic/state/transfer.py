"""Sends a state from one rank to others over the generation's group: first a description, then the tensors.

Receivers read the description with `torch.load(weights_only=True)`: numbers, text, containers and tensors, never code.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbelastic.errors import StateError
from nbelastic.state.memory import fits
from nbelastic.state.tensor_snapshot import copy_all
from nbelastic.worker.worker_report import WorkerFacts

LARGE = 1 << 20  # bytes; a larger tensor is sent by itself, without a bucket
PIECE = 32 << 20  # bytes; a receiver on an accelerator passes on one piece while it receives the next
PACKED = 256 << 20  # bytes of packed tensors after which they are unpacked, so that they take no more memory
CPU = torch.device("cpu")
KINDS = {"small": "a small value", "modules": "a model", "optimizers": "an optimizer"}
TENSOR = "\0tensor"  # a description has (TENSOR, index, shape, dtype, device type) in place of each tensor


def describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with a placeholder for each tensor; the tensors are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        dtype = str(value.dtype).removeprefix("torch.")
        return (TENSOR, len(tensors) - 1, tuple(value.shape), dtype, value.device.type)
    if isinstance(value, dict):
        return {key: describe(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(describe(item, tensors) for item in value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()  # receivers read a plain number
    return value


def rebuild(description: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """The inverse of `describe`."""
    if _is_placeholder(description):
        return tensors[description[1]]
    if isinstance(description, dict):
        return {key: rebuild(item, tensors) for key, item in description.items()}
    if isinstance(description, (list, tuple)):
        return type(description)(rebuild(item, tensors) for item in description)
    return description


def destinations(description: Any, mine: Any, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """For each tensor of `description` its index and where to receive it: the same tensor in `mine`, or a new one."""
    if _is_placeholder(description):
        _, index, shape, dtype, kind = description
        wanted = (tuple(shape), getattr(torch, dtype))
        if isinstance(mine, torch.Tensor) and (tuple(mine.shape), mine.dtype) == wanted:
            yield index, mine.detach()
        else:
            yield index, torch.empty(shape, dtype=wanted[1], device=device if kind != "cpu" else "cpu")
    elif isinstance(description, dict):
        for key, item in description.items():
            yield from destinations(item, mine.get(key) if isinstance(mine, dict) else None, device)
    elif isinstance(description, (list, tuple)):
        for index, item in enumerate(description):
            there = isinstance(mine, (list, tuple)) and index < len(mine)
            yield from destinations(item, mine[index] if there else None, device)


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 5 and isinstance(value[0], str) and value[0] == TENSOR


class Channel:
    """From `root` to `receivers` in the default group. Ranks that are up to date take no part.

    Gloo broadcasts if all others receive, else the root sends to each. On an accelerator each receiver passes the data on to
    the next: an abort leaves garbage in every output of a broadcast, and a live tensor of another rank must not be one. Gloo
    cannot send GPU tensors point to point, so it sends copies of them.

    `check()` waits for the device and raises if the generation is over: before, nothing that an accelerator has received is
    used.
    """

    def __init__(
        self,
        root: int,
        receivers: Iterable[int],
        rank: int,
        world_size: int,
        device: torch.device,
        *,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._root = root
        self._receivers = tuple(receivers)
        self.device = device
        self._check = check
        self._group = dist.group.WORLD  # now: an abandoned thread must not reach the next generation's group
        self.receives = rank in self._receivers
        self.sends = rank == root
        self.takes_part = self.sends or self.receives
        self._all = len(self._receivers) == world_size - 1
        self._wire = device if self._on_accelerator(device) else CPU
        order = (root, *self._receivers)
        at = order.index(rank) if self.takes_part else 0
        self._before, self._after = order[max(0, at - 1)], order[at + 1 : at + 2]
        self._to_pass_on: torch.Tensor | None = None  # what has arrived last

    def _on_accelerator(self, device: torch.device) -> bool:
        """Whether operations on tensors of this device end later, and end without an error after an abort."""
        return bool(self._group._get_backend(device).name() != "gloo")

    @property
    def is_on_accelerator(self) -> bool:
        """Whether an accelerator sends the tensors: after an abort it writes nothing more to them."""
        return self._on_accelerator(self._wire)

    def begin(self, flat: torch.Tensor) -> list[Any]:
        """Begin to send `flat` (contiguous, where the channel sends), or to receive into it. Returns the works to wait for."""
        flat = flat.view(torch.uint8)  # gloo does not support all types of numbers
        if self.receives:
            # A group's writes are not counted as changes, and snapshots go by that number.
            torch.autograd.graph.increment_version(flat)
        if self._on_accelerator(flat.device):
            return [work for piece in flat.split(PIECE) for work in self._pass_on(piece)]
        if self._all:
            return [dist.broadcast(flat, self._root, group=self._group, async_op=True)]
        if self.sends:
            return [dist.isend(flat, rank, group=self._group) for rank in self._receivers]
        return [dist.irecv(flat, self._root, group=self._group)] if self.receives else []

    def _pass_on(self, piece: torch.Tensor | None) -> list[Any]:
        """Receive `piece` and, at the same time, send what arrived before it to the next rank."""
        operations = []
        outgoing = piece if self.sends else self._to_pass_on
        if self.receives:
            self._to_pass_on = piece
            if piece is not None:
                operations.append(dist.P2POp(dist.irecv, piece, self._before, self._group))
        if outgoing is not None:
            operations += [dist.P2POp(dist.isend, outgoing, rank, self._group) for rank in self._after]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def _finish(self, works: list[Any]) -> None:
        """Wait for all `works`, and for what is still to be passed on. On an accelerator they may end later."""
        works += self._pass_on(None)
        wait_for_all(works)

    def move(self, flat: torch.Tensor) -> None:
        """Send `flat`, or receive into it."""
        self._finish(self.begin(flat))
        if self._on_accelerator(flat.device):
            self._check()

    def move_object(self, value: Any) -> Any:
        """Send `value` and return it, or return what the root sent. StateError if it holds more than plain data."""
        body = torch.frombuffer(to_bytes(value), dtype=torch.uint8) if self.sends else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([body.numel()])
        self.move(length)
        if not self.sends:
            body = torch.empty(int(length), dtype=torch.uint8)
        self.move(body)
        return value if self.sends else from_bytes(body.numpy().tobytes())

    def move_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send these tensors, or receive into them in place: large ones one by one, small ones in buckets."""
        works: list[Any] = []
        packed: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        size = 0
        try:
            for bucket in _buckets(tensors):
                if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].device == self._wire:
                    works += self.begin(bucket[0].detach().view(-1))
                    continue
                flat = torch.empty(sum(t.numel() for t in bucket), dtype=bucket[0].dtype, device=self._wire)
                if self.sends:
                    _pack(bucket, flat)
                works += self.begin(flat)
                packed.append((flat, bucket))
                size += flat.nbytes
                if size >= PACKED:
                    self._finish_packed(works, packed)
                    size = 0
            self._finish_packed(works, packed)
        finally:
            wait_for_all(works)
        if self.is_on_accelerator:
            self._check()

    def _finish_packed(self, works: list[Any], packed: list[tuple[torch.Tensor, list[torch.Tensor]]]) -> None:
        begun = [*works]
        works.clear()  # each of them allows only one wait
        self._finish(begun)
        for flat, bucket in packed:
            if self.receives:
                _unpack(flat, bucket)
        packed.clear()


def _pack(bucket: list[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy the tensors into `flat`: those of another device all at once."""
    if len(bucket) == 1:
        flat.view(bucket[0].shape).copy_(bucket[0].detach())
        return
    elsewhere = [t for t in bucket if t.device != flat.device]
    if elsewhere:
        moved = torch.cat([t.detach().reshape(-1) for t in elsewhere]).to(flat.device)
        parts = iter(moved.split([t.numel() for t in elsewhere]))
        bucket = [next(parts) if t.device != flat.device else t for t in bucket]
    torch.cat([t.detach().reshape(-1) for t in bucket], out=flat)


def _unpack(flat: torch.Tensor, bucket: list[torch.Tensor]) -> None:
    """The inverse of `_pack`."""
    pieces = flat.split([t.numel() for t in bucket])
    pairs = [(piece.view(t.shape), t) for piece, t in zip(pieces, bucket, strict=True)]
    elsewhere = [(piece, t) for piece, t in pairs if t.device != flat.device]
    pairs = [(piece, t) for piece, t in pairs if t.device == flat.device]
    if elsewhere:
        where = elsewhere[0][1].device
        moved = (
            torch.cat([piece.reshape(-1) for piece, _ in elsewhere]) if len(elsewhere) > 1 else elsewhere[0][0].view(-1)
        )
        parts = moved.to(where).split([t.numel() for _, t in elsewhere])
        pairs += [(part.view(t.shape), t) for part, (_, t) in zip(parts, elsewhere, strict=True)]
    copy_all([piece for piece, _ in pairs], to=[t for _, t in pairs])


def to_bytes(value: Any) -> bytearray:
    """Plain data and tensors as bytes. StateError if `value` cannot be saved."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # noqa: BLE001  (pickling fails in many ways)
        raise _not_plain(error) from None
    return bytearray(buffer.getbuffer())


def from_bytes(data: bytes) -> Any:
    """The inverse of `to_bytes`. StateError if it is more than plain data and tensors: no code is run."""
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # noqa: BLE001  (torch raises many kinds)
        raise _not_plain(error) from None


def receive(
    channel: Channel,
    places: list[torch.Tensor],
    facts: WorkerFacts,
    run: Callable[[Callable[[], None]], None],
    processes: int,
) -> None:
    """Receive into `places`. A rank that holds a state now receives into new memory first, if there is enough of it.

    `facts.holds_state` becomes False before the tensors are a mixture of two commits. `run` runs a transfer in a thread
    that may be abandoned. `processes` processes of this machine may receive at the same time.
    """
    received = _allocate_like(places) if facts.holds_state and fits(places, channel.device, processes) else None
    if received is not None:
        run(lambda: channel.move_tensors(received))
        facts.holds_state = False  # until all of them are in place
        copy_all(received, to=places)
    else:
        facts.holds_state = False
        if channel.is_on_accelerator:
            # Here too. NCCL keeps for each thread that a batch was begun: an abort within one would leave the main thread in it.
            run(lambda: channel.move_tensors(places))
        else:
            channel.move_tensors(places)


def _allocate_like(places: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """New tensors, or None if memory is short after all: on a fragmented GPU, or with several ranks on one."""
    try:
        return [torch.empty_like(place) for place in places]
    except RuntimeError:
        return None


def wait_for_all(works: list[Any]) -> None:
    """Wait for all works, also when one fails: a work that still runs may write to its tensor."""
    failure: RuntimeError | None = None
    for work in works:
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def check_plain(value: Any) -> None:
    """StateError if a receiver would refuse `value`. Of a dict, it names the first key whose value is refused."""
    try:
        from_bytes(bytes(to_bytes(value)))
    except StateError:
        for name, item in value.items() if isinstance(value, dict) else ():
            try:
                from_bytes(bytes(to_bytes(item)))
            except StateError as error:
                text = str(error).replace("the state holds", f"the state's {name!r} is or holds", 1)
                raise StateError(text) from None
        raise


def why_not_plain(error: Exception) -> str:
    """Why torch cannot load the data with `weights_only`, without torch's advice."""
    return str(error).rpartition("WeightsUnpickler error: ")[2].partition(". Please use")[0].partition("\n")[0][:200]


def _not_plain(error: Exception) -> StateError:
    return StateError(
        f"the state holds something that is not plain data ({why_not_plain(error)}); keep numbers, text, lists, dicts and tensors "
        "in it, or allow the class with torch.serialization.add_safe_globals()."
    )


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Large tensors one by one, small ones of one type in buckets of up to LARGE bytes."""
    runs: dict[torch.dtype, list[torch.Tensor]] = {}
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        kind = tensor.dtype
        if tensor.nbytes >= LARGE:
            yield [tensor]
        elif tensor.numel():
            runs.setdefault(kind, []).append(tensor)
            sizes[kind] += tensor.nbytes
            if sizes[kind] >= LARGE:
                sizes[kind] = 0
                yield runs.pop(kind)
    yield from runs.values()


def compare(theirs: dict[str, Any], mine: dict[str, Any], but: Container[str] = ()) -> None:
    """StateError, with the first difference, if the two descriptions are not of the same models. Tensors in `but` may differ."""
    for kind in KINDS:
        for name in sorted(theirs[kind].keys() ^ mine[kind].keys()):
            here, there = (next((KINDS[one] for one in KINDS if name in side[one]), None) for side in (mine, theirs))
            if here and there:
                advice = "give models and optimizers to the state where it is made."
                raise StateError(f"{name!r} is {here} here and {there} in the received state: {advice}")
            here, there = ("", "not ") if here else ("not ", "")
            raise StateError(f"{name!r} is {here}in the state here and {there}in the received one.")
    for name, module in theirs["modules"].items():
        own = mine["modules"][name]
        for key in (*module, *(key for key in own if key not in module)):
            sent, held = (shape_of(contents.get(key)) for contents in (module, own))
            if sent != held and f"{name}.{key}" not in but:
                raise StateError(f"{name}.{key} is {held} here and {sent} in the received state.")


def shape_of(value: Any) -> tuple[Any, ...] | None:
    """Shape and type of a tensor or its placeholder; None for None."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return tuple(value[2:4])
