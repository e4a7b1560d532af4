"""Tensors of a state: have they changed since the commit, and what were they then?

Autograd counts the changes in place of every tensor (`_version`). It does not see those made through `.data`, nor those
of BatchNorm's kernels to their running statistics: small tensors are copied without asking.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch

SMALL = 1 << 20  # bytes
ALIGNED = 64  # bytes at which each copy begins

_counts = attrgetter("_version")


class Part:
    """Some of a state's tensors. With `keep` they are copied at each commit, as many of them as have changed.

    Without it nothing is copied, and the live tensors have to do. Copies of GPU tensors lie in pinned memory of the host.
    With `beside` they are made on a stream of their own, which `settle` waits for: for tensors that only a step changes.
    """

    def __init__(self, *, keep: bool, beside: bool = False) -> None:
        self.keep = keep
        self._beside = beside
        self._gpu: torch.device | None = None
        self._watched: Sequence[torch.Tensor] = ()
        self._changes: list[int] | None = []
        # By the live tensor's id: itself (so that the id stays its own), its copy, its count of changes at that time.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor, int | None]] = {}
        self._stream: torch.cuda.Stream | None = None

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """These, from now on, tell whether anything changes."""
        self._watched = tensors
        self._changes = changes(tensors)

    def changed(self) -> bool:
        """Whether a watched tensor has changed since the last commit."""
        now = changes(self._watched)
        return now is None or now != self._changes

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """What is counted as a change inside leaves every number as it was."""
        before = self.changed()
        yield
        if not before:
            self._changes = changes(self._watched)

    def first_changed(self) -> torch.Tensor | None:
        now = changes(self._watched) or []
        pairs = zip(self._watched, now, self._changes or [], strict=False)
        return next((tensor for tensor, count, before in pairs if count != before), None)

    def commit(self, tensors: Sequence[torch.Tensor]) -> None:
        """As they are now is what `restore` returns to."""
        self._changes = changes(self._watched)
        if self.keep:
            self._copy(tensors)
        else:
            self._copies = {}

    def settle(self) -> None:
        """To be called before the tensors change: a GPU finishes the copies first."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def restore(self) -> None:
        """Put back what was copied at the commit: all of it, as changes through `.data` are not counted."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        pairs = [(live, kept) for live, kept, _ in self._copies.values()]
        put_all([live for live, _ in pairs], [kept for _, kept in pairs])
        if pairs:
            self._copies = {id(live): (live, kept, _count(live)) for live, kept in pairs}
            self._changes = changes(self._watched)

    def _copy(self, tensors: Sequence[torch.Tensor]) -> None:
        copies: dict[int, tuple[torch.Tensor, torch.Tensor, int | None]] = {}
        places, sources = [], []
        self._gpu = next((t.device for t in tensors if t.device.type == "cuda"), None)
        new = [t for t in tensors if not _alike(t, self._copies.get(id(t)))]
        made = {id(t): place for t, place in zip(new, _places_for(new, pinned=self._gpu is not None), strict=True)}
        for tensor in tensors:
            place, count = made.get(id(tensor)), _count(tensor)
            known = self._copies[id(tensor)] if place is None else (tensor, place, None)
            if known[2] is None or known[2] != count or tensor.nbytes <= SMALL:
                places.append(known[1])
                sources.append(tensor)
            copies[id(tensor)] = (tensor, known[1], count)
        self._copies = copies
        if self._gpu is None or not self._beside:
            put_all(places, sources)
            return
        self._stream = self._stream or torch.cuda.Stream(self._gpu)
        self._stream.wait_stream(torch.cuda.current_stream(self._gpu))
        with torch.cuda.stream(self._stream):
            put_all(places, sources)


def changes(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """How often each was changed in place; None if that is not known, as of tensors made in inference mode."""
    try:
        return list(map(_counts, tensors))
    except RuntimeError:
        return None


def _count(tensor: torch.Tensor) -> int | None:
    counted = changes((tensor,))
    return counted[0] if counted else None


def _alike(tensor: torch.Tensor, known: tuple[torch.Tensor, torch.Tensor, int | None] | None) -> bool:
    return known is not None and (known[1].shape, known[1].dtype) == (tensor.shape, tensor.dtype)


def _places_for(tensors: Sequence[torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
    """Memory for copies, in one block: what is large enough goes back to the system when it is given up."""
    lengths = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors]
    block = torch.empty(sum(lengths), dtype=torch.uint8, pin_memory=pinned)
    parts = block.split(lengths)
    return [p[: t.nbytes].view(t.dtype).view(t.shape) for p, t in zip(parts, tensors, strict=True)]


def put_all(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """In the order of the present stream; between GPU and pinned memory nobody waits for it."""
    with torch.no_grad():
        if places:
            torch._foreach_copy_(places, sources, non_blocking=True)
