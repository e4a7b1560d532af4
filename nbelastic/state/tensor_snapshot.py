"""Copies of tensors as of the last commit, and whether the tensors have changed since.

Autograd counts the in-place changes of each tensor (`_version`). It does not count changes through `.data`, by collectives, by
fused optimizers, nor those that BatchNorm's kernels make to running statistics. So only large tensors that nothing of
this should change are left out: see `commit` and `expect_changes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

SMALL = 1 << 20  # bytes
SAMPLES = 1024  # elements
BLOCK = 1 << 30  # bytes; torch rounds a block of pinned memory up to a power of two
ALIGNMENT = 64  # bytes
CPU = torch.device("cpu")

_version = attrgetter("_version")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the bytes of an element
# CUDA has no kernel that copies many tensors of these types. Not all versions of torch have the last.
_COPIED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64} | {
    getattr(torch, name): torch.uint8 for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)
}


class Copy(NamedTuple):
    """The copy of a live tensor, whose version was `version` then; None: not known. `pinned`: it is in pinned memory."""

    live: torch.Tensor
    copy: torch.Tensor
    version: int | None
    pinned: bool


class TensorSnapshot:
    """With `keep`, each commit copies the tensors that have changed; without it, none.

    Of a GPU's tensors, small ones are copied on the GPU, with one launch. Large ones are copied to the host: to pinned memory
    from the second copy of a tensor on, as allocating that takes longer than one copy. With `in_background`, the copies run
    on a CUDA stream of their own, which `wait_for_copies` waits for: use it while only a step changes the tensors.
    """

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.in_background = False
        self._gpu: torch.device | None = None
        self._watched: Sequence[torch.Tensor] = ()
        self._versions: list[int] | None = []
        self._copies: dict[int, Copy] = {}  # by the live tensor's id, which the copy's reference keeps its own
        self._expected: set[int] = set()  # ids of tensors that the next commit copies in any case
        self._older: set[int] = set()  # ids of tensors whose copies are of an earlier commit: no change was counted
        self._moving: set[int] = set()  # ids of those that have changed all the same: each commit copies them
        self.has_moved = False  # `restore` has found one, and does not know its values at the commit
        self._stream: torch.cuda.Stream | None = None
        self._being_read: list[torch.Tensor] = []  # on that stream: their memory must not be used for anything else

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """From now on `changed` is about these tensors."""
        self._watched = tensors
        self._versions = versions(tensors)

    def changed(self) -> bool:
        """Whether a watched tensor has changed since the last commit."""
        now = versions(self._watched)
        return now is None or now != self._versions

    def forget(self) -> None:
        """From now on `changed` is true, until the next commit."""
        self._versions = None

    def first_changed(self) -> torch.Tensor | None:
        """The first watched tensor that has changed, if it is known."""
        now = versions(self._watched) or []
        pairs = zip(self._watched, now, self._versions or [], strict=False)
        return next((tensor for tensor, count, before in pairs if count != before), None)

    def expect_changes(self, tensors: Sequence[torch.Tensor]) -> None:
        """The next commit copies these, whether a change of them is counted or not."""
        self._expected.update(map(id, tensors))

    def commit(self, tensors: Sequence[torch.Tensor], *, counted: bool = False) -> None:
        """`restore` returns to the present values. `counted`: a large tensor is copied only if a change of it was counted."""
        before, self._versions = self._versions, versions(self._watched)
        self._expected |= self._moving
        self.has_moved = False
        if self.keep:
            unchanged = self._copy(tensors, counted)
            is_later = bool(self._expected) or self._versions != before  # than the last commit: something has changed
            self._older = unchanged if is_later else self._older & unchanged
        else:
            self.drop()
        self._expected.clear()

    def drop(self) -> None:
        """Free the copies."""
        pinned = any(one.pinned for one in self._copies.values())
        self._copies, self._being_read, self._older, self._moving = {}, [], set(), set()
        if pinned:
            free_pinned()

    def drop_pinned(self) -> None:
        """Free the copies if they take pinned memory, which is scarce. Then nothing can be restored before the next commit."""
        if any(one.pinned for one in self._copies.values()):
            self.keep = False
            self.drop()

    def wait_for_copies(self) -> None:
        """Call this before the tensors change: the GPU finishes the copies first."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def restore(self) -> None:
        """Copy back all tensors that the commit has copied, not only changed ones: changes through `.data` are not counted.

        For the same reason an older copy may lack the changes of many steps. It is used only if a change was counted since.
        Else ranks that have not made the same changes differ: see `has_moved`.
        """
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        older = {key: one for key, one in self._copies.items() if self._is_as_it_was(one)}
        moved = {key for key, one in older.items() if _differs(one)}
        self._moving |= moved
        self.has_moved = self.has_moved or bool(moved)
        known = [one for key, one in self._copies.items() if key not in older]
        for one in known:
            if not _fits(one.live, one):  # changed by resize_(), half() or through `.data`
                one.live.data = torch.empty_like(one.copy, device=one.live.device)
        copy_all([one.copy for one in known], to=[one.live for one in known])
        if known:
            self._copies |= {id(one.live): one._replace(version=_version_of(one.live)) for one in known}
            self._versions = versions(self._watched)

    def _is_as_it_was(self, one: Copy) -> bool:
        """Whether its copy is older than the commit, and nothing that is counted or expected has changed it since."""
        key, version = id(one.live), _version_of(one.live)
        same = key in self._older and key not in self._expected and version == one.version
        return same and _fits(one.live, one)

    def _copy(self, tensors: Sequence[torch.Tensor], counted: bool) -> set[int]:
        """Returns the ids of tensors of which it keeps the copies that are there."""
        self._gpu = next((t.device for t in tensors if t.is_cuda), None)
        kept, new, changed = {}, [], []
        for tensor in tensors:
            known, version = self._copies.get(id(tensor)), _version_of(tensor)
            is_same = counted and version is not None and known is not None and known.version == version
            is_changed = not is_same or tensor.nbytes < SMALL or id(tensor) in self._expected
            if known is None or not _fits(tensor, known) or (is_changed and _is_slow(known)):
                new.append((tensor, version, known is not None and _is_large_on_gpu(tensor)))
                continue
            kept[id(tensor)] = known._replace(version=version)
            if is_changed:
                changed.append(kept[id(tensor)])
        self._copies = {}  # first free the memory of those that are not kept; and if memory is short, none is up to date
        memory = allocate([(tensor, _place(tensor), pinned) for tensor, _, pinned in new])
        made = [Copy(live, copy, version, pinned) for (live, version, pinned), copy in zip(new, memory, strict=True)]
        self._copy_now_or_later(changed + made)
        self._copies = {**kept, **{id(one.live): one for one in made}}
        return kept.keys() - {id(one.live) for one in changed}

    def _copy_now_or_later(self, copies: list[Copy]) -> None:
        targets = [one.copy for one in copies]
        if self._gpu is None or not self.in_background:
            copy_all([one.live for one in copies], to=targets)
            return
        self._stream = self._stream or torch.cuda.Stream(self._gpu)
        self._stream.wait_stream(torch.cuda.current_stream(self._gpu))
        self._being_read = [one.live.detach() for one in copies]
        with torch.cuda.stream(self._stream):
            copy_all(self._being_read, to=targets)


def versions(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """How often each was changed in place; None if torch does not know, as of tensors made in inference mode."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return None


def hashes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A hash of each tensor's bytes, wherever it is. Empty ones are left out."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
    found = [torch.hash_tensor(one.view(_INTEGERS.get(one.element_size(), torch.int64))) for one in flat]
    return torch.stack(found).view(torch.int64).tolist() if found else []


def _version_of(tensor: torch.Tensor) -> int | None:
    found = versions((tensor,))
    return found[0] if found else None


def _differs(one: Copy) -> bool:
    """Whether the tensor differs from its copy in one of some `SAMPLES` elements: a target network moves as a whole."""
    if not (one.live.is_contiguous() and one.copy.is_contiguous()):
        return not torch.equal(one.live.detach().cpu(), one.copy.cpu())
    step = max(1, one.live.numel() // SAMPLES)
    # as bytes: torch cannot copy parts of tensors of some types
    both = (tensor.detach().view(-1).view(torch.uint8) for tensor in (one.live, one.copy))
    mine, then = (elements.view(-1, one.live.element_size())[::step].cpu() for elements in both)
    return not torch.equal(mine, then)


def _fits(tensor: torch.Tensor, known: Copy) -> bool:
    return (known.copy.shape, known.copy.dtype) == (tensor.shape, tensor.dtype)


def _is_large_on_gpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cuda and tensor.nbytes >= SMALL)


def _is_slow(known: Copy) -> bool:
    return _is_large_on_gpu(known.live) and not known.pinned


def _place(tensor: torch.Tensor) -> torch.device:
    return CPU if _is_large_on_gpu(tensor) else tensor.device


def allocate(wanted: Sequence[tuple[torch.Tensor, torch.device, bool]]) -> list[torch.Tensor]:
    """Memory for a copy of each tensor on that device, pinned where that is true.

    It is in large blocks: they go back to the system when they are freed.
    """
    blocks: dict[tuple[torch.device, bool], list[list[int]]] = {}  # lengths
    places = []
    for tensor, device, pinned in wanted:
        of_device = blocks.setdefault((device, pinned), [[]])
        length = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if of_device[-1] and sum(of_device[-1]) + length > BLOCK:
            of_device.append([])
        places.append(((device, pinned), len(of_device) - 1, len(of_device[-1])))
        of_device[-1].append(length)
    parts = {
        (device, pinned): [
            torch.empty(sum(lengths), dtype=torch.uint8, device=device, pin_memory=pinned).split(lengths)
            for lengths in of_device
        ]
        for (device, pinned), of_device in blocks.items()
    }
    return [
        parts[where][block][index][: t.nbytes].view(t.dtype).view(t.shape)
        for (where, block, index), (t, _, _) in zip(places, wanted, strict=True)
    ]


def free_pinned() -> None:
    """Give pinned memory that is not used back to the system: torch would keep it for the life of the process."""
    torch._C._host_emptyCache()


def copy_all(sources: list[torch.Tensor], *, to: list[torch.Tensor]) -> None:
    """Copy in the order of the present stream, without waiting for copies between a GPU and pinned memory.

    One launch copies many tensors of one type within a GPU.
    """
    groups: dict[tuple[torch.device, torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for source, target in zip(map(_as_copied, sources), map(_as_copied, to), strict=True):
        group = groups.setdefault((source.device, target.device, source.dtype), ([], []))
        group[0].append(source)
        group[1].append(target)
    with torch.no_grad():
        for same_sources, same_targets in groups.values():
            torch._foreach_copy_(same_targets, same_sources, non_blocking=True)


def _as_copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_COPIED_AS[tensor.dtype]) if tensor.dtype in _COPIED_AS else tensor


def clone_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of each, where it is."""
    made = [torch.empty_like(tensor) for tensor in tensors]
    copy_all([tensor.detach() for tensor in tensors], to=made)
    return made


def clone_tensors(values: Any) -> Any:
    """Containers like `values`, with a copy of each tensor."""
    leaves, structure = tree_flatten(values)
    copies = iter(clone_all([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]))
    return tree_unflatten([next(copies) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)
