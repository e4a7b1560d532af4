"""Moving a state from one rank to others over the generation's group: a small description, then the tensors in buckets.

The description is read with `torch.load(weights_only=True)`: numbers, text, containers and tensors, never code.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nbelastic.errors import StateError
from nbelastic.state.memory import fits
from nbelastic.state.snapshot import put_all
from nbelastic.worker.worker_report import WorkerFacts

R = TypeVar("R")

LARGE = 1 << 20  # bytes; a larger tensor is sent as it lies
TENSOR = "\0tensor"  # begins what stands in a description for a tensor: (TENSOR, index, shape, dtype, device type)


def describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with a mark in place of each tensor; the tensors are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        dtype = str(value.dtype).removeprefix("torch.")
        return (TENSOR, len(tensors) - 1, tuple(value.shape), dtype, value.device.type)
    if isinstance(value, dict):
        return {key: describe(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(describe(item, tensors) for item in value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()  # a number, and nothing else to the ranks that receive it
    return value


def rebuild(description: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """The inverse of `describe`."""
    if _is_mark(description):
        return tensors[description[1]]
    if isinstance(description, dict):
        return {key: rebuild(item, tensors) for key, item in description.items()}
    if isinstance(description, (list, tuple)):
        return type(description)(rebuild(item, tensors) for item in description)
    return description


def destinations(description: Any, mine: Any, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """For each tensor of `description` where to receive it: the one at the same place in `mine`, or a new one."""
    if _is_mark(description):
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


def _is_mark(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 5 and value[0] == TENSOR


class Channel:
    """From `root` to `receivers` within the default group: a broadcast when all others receive, else one to one.

    Sending one to one leaves ranks that are up to date alone; with NCCL it would open a communicator a pair, so there
    everybody takes part and ranks that are up to date receive what they have.
    """

    def __init__(self, root: int, receivers: Iterable[int], rank: int, world_size: int, device: torch.device) -> None:
        self._root = root
        self._receivers = tuple(receivers)
        self._rank = rank
        self.device = device
        self._group = dist.group.WORLD  # a thread that is left behind must not reach the next generation's
        self._all = len(self._receivers) == world_size - 1 or device.type == "cuda"
        self.receives = rank in self._receivers
        self.sends = rank == root
        self.takes_part = self.sends or self.receives or self._all

    def begin(self, flat: torch.Tensor) -> list[Any]:
        """Begin to send `flat` (contiguous, on the channel's device), or to receive into it: what is to be waited for."""
        flat = flat.view(torch.uint8)  # gloo knows some types of numbers only
        if self._all:
            return [dist.broadcast(flat, self._root, group=self._group, async_op=True)]
        if self.sends:
            return [dist.isend(flat, rank, group=self._group) for rank in self._receivers]
        return [dist.irecv(flat, self._root, group=self._group)] if self.receives else []

    def move(self, flat: torch.Tensor) -> None:
        """Send `flat`, or receive into it."""
        _wait(self.begin(flat))

    def move_object(self, value: Any) -> Any:
        """Send `value` and return it, or return what the root sent. StateError if it is made of more than plain data."""
        data = torch.empty(0, dtype=torch.uint8)
        if self.sends:
            buffer = io.BytesIO()
            try:
                torch.save(value, buffer)
            except Exception as error:  # noqa: BLE001  (pickling fails in many ways)
                raise _not_plain(error) from None
            data = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64, device=self.device)
        self.move(length)
        body = data.to(self.device) if self.sends else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self.move(body)
        if self.sends:
            return value
        try:
            return torch.load(io.BytesIO(body.cpu().numpy().tobytes()), weights_only=True)
        except Exception as error:  # noqa: BLE001  (torch raises many kinds)
            raise _not_plain(error) from None

    def move_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send these tensors, or receive into them, in place: large ones as they lie, small ones by the bucket."""
        works: list[Any] = []
        packed = []
        try:
            for bucket in _buckets(tensors):
                if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].device == self.device:
                    works += self.begin(bucket[0].detach().view(-1))
                    continue
                flat = torch.empty(sum(t.numel() for t in bucket), dtype=bucket[0].dtype, device=self.device)
                if self.sends:
                    torch.cat([t.reshape(-1).to(self.device) for t in bucket], out=flat)
                works += self.begin(flat)
                packed.append((flat, bucket))
        finally:
            _wait(works)
        if self.receives:
            for flat, bucket in packed:
                for piece, tensor in zip(flat.split([t.numel() for t in bucket]), bucket, strict=True):
                    tensor.copy_(piece.view(tensor.shape))


def at_once(task: Callable[[], R]) -> R:
    """Run `task` here."""
    return task()


def receive(
    channel: Channel,
    places: list[torch.Tensor],
    facts: WorkerFacts,
    apart: Callable[[Callable[[], None]], None],
    neighbours: int,
    *,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Receive into `places`, by way of memory of its own if this rank holds a state now and there is enough for that.

    `facts.holds_state` is False from the moment from which the tensors are of two commits. `apart` runs a transfer in a
    thread that may be left behind; so many processes on this machine (`neighbours`) may receive at the same time.
    `check` raises if what has arrived cannot be relied on.
    """
    arrived = _scratch(places) if facts.holds_state and fits(places, channel.device, neighbours) else None
    if arrived is not None:
        apart(lambda: channel.move_tensors(arrived))
        check()
        facts.holds_state = False  # until all of them are in place
        put_all(places, arrived)
    else:
        facts.holds_state = False
        channel.move_tensors(places)
        check()


def _scratch(places: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Memory for as much, or None if there is not enough after all: a fragmented GPU, or several ranks on one."""
    try:
        return [torch.empty_like(place) for place in places]
    except RuntimeError:
        return None


def _wait(works: list[Any]) -> None:
    """Wait for all of them, also when one fails: while any is under way it may write to its tensor."""
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
    """StateError if a receiver would refuse `value`."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getbuffer()), weights_only=True)
    except Exception as error:  # noqa: BLE001  (pickling fails in many ways)
        raise _not_plain(error) from None


def why_not_plain(error: Exception) -> str:
    """What torch minds about data that it shall load with `weights_only`, without its advice."""
    return str(error).rpartition("WeightsUnpickler error: ")[2].partition(". Please use")[0].partition("\n")[0][:200]


def _not_plain(error: Exception) -> StateError:
    return StateError(
        f"the state holds something that is not plain data ({why_not_plain(error)}); keep numbers, text, lists, dicts and tensors "
        "in it, or allow the class with torch.serialization.add_safe_globals()."
    )


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Large tensors one by one, and the small ones of one type in runs of up to LARGE bytes."""
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


def compare(theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    """The two descriptions of states must be of the same models. StateError names the first difference."""
    for kind in ("small", "modules", "optimizers"):
        odd = sorted(theirs[kind].keys() ^ mine[kind].keys())
        if odd:
            here, there = ("", "not ") if odd[0] in mine[kind] else ("not ", "")
            raise StateError(f"{odd[0]!r} is {here}in the state here and {there}in the one that is received.")
    for name, module in theirs["modules"].items():
        own = mine["modules"][name]
        for key in (*module, *(key for key in own if key not in module)):
            sent, held = (shape_of(contents.get(key)) for contents in (module, own))
            if sent != held:
                raise StateError(f"{name}.{key} is {held} here and {sent} in the state that is received.")


def shape_of(value: Any) -> tuple[Any, ...] | None:
    """Shape and type of a tensor, or of the mark that stands for one."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return tuple(value[2:4])
