"""Copies of tensors as of the last commit, and whether the tensors have changed since.

Autograd counts the in-place changes of each tensor (`_version`). It does not count changes through `.data`, nor those that
BatchNorm's kernels make to running statistics. So small tensors are always copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch

SMALL = 1 << 20  # bytes
ALIGNMENT = 64  # bytes

_version = attrgetter("_version")


class TensorSnapshot:
    """With `keep`, each commit copies the tensors that have changed; without it, none. GPU tensors are copied to pinned memory.

    With `in_background`, the copies run on a CUDA stream of their own, which `wait_for_copies` waits for: use it for tensors
    that only a step changes.
    """

    def __init__(self, *, keep: bool, in_background: bool = False) -> None:
        self.keep = keep
        self._in_background = in_background
        self._gpu: torch.device | None = None
        self._watched: Sequence[torch.Tensor] = ()
        self._versions: list[int] | None = []
        # By the live tensor's id: the tensor (so that the id stays its own), its copy, its version when it was copied.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor, int | None]] = {}
        self._stream: torch.cuda.Stream | None = None

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """From now on `changed` is about these tensors."""
        self._watched = tensors
        self._versions = versions(tensors)

    def changed(self) -> bool:
        """Whether a watched tensor has changed since the last commit."""
        now = versions(self._watched)
        return now is None or now != self._versions

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Do not count changes inside this context: they leave every number as it was."""
        before = self.changed()
        yield
        if not before:
            self._versions = versions(self._watched)

    def first_changed(self) -> torch.Tensor | None:
        """The first watched tensor that has changed, if it is known."""
        now = versions(self._watched) or []
        pairs = zip(self._watched, now, self._versions or [], strict=False)
        return next((tensor for tensor, count, before in pairs if count != before), None)

    def commit(self, tensors: Sequence[torch.Tensor]) -> None:
        """`restore` returns to the present values."""
        self._versions = versions(self._watched)
        if self.keep:
            self._copy(tensors)
        else:
            self._copies = {}

    def wait_for_copies(self) -> None:
        """Call this before the tensors change: the GPU finishes the copies first."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def restore(self) -> None:
        """Copy back all tensors, not only changed ones: changes through `.data` are not counted."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        pairs = [(live, copy) for live, copy, _ in self._copies.values()]
        copy_all([copy for _, copy in pairs], to=[live for live, _ in pairs])
        if pairs:
            self._copies = {id(live): (live, copy, _version_of(live)) for live, copy in pairs}
            self._versions = versions(self._watched)

    def _copy(self, tensors: Sequence[torch.Tensor]) -> None:
        copies: dict[int, tuple[torch.Tensor, torch.Tensor, int | None]] = {}
        sources, targets = [], []
        self._gpu = next((t.device for t in tensors if t.device.type == "cuda"), None)
        new = [t for t in tensors if not _fits(t, self._copies.get(id(t)))]
        made = {id(t): target for t, target in zip(new, _allocate(new, pinned=self._gpu is not None), strict=True)}
        for tensor in tensors:
            target, version = made.get(id(tensor)), _version_of(tensor)
            known = self._copies[id(tensor)] if target is None else (tensor, target, None)
            if known[2] is None or known[2] != version or tensor.nbytes <= SMALL:
                sources.append(tensor)
                targets.append(known[1])
            copies[id(tensor)] = (tensor, known[1], version)
        self._copies = copies
        if self._gpu is None or not self._in_background:
            copy_all(sources, to=targets)
            return
        self._stream = self._stream or torch.cuda.Stream(self._gpu)
        self._stream.wait_stream(torch.cuda.current_stream(self._gpu))
        with torch.cuda.stream(self._stream):
            copy_all(sources, to=targets)


def versions(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """How often each was changed in place; None if torch does not know, as of tensors made in inference mode."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return None


def _version_of(tensor: torch.Tensor) -> int | None:
    found = versions((tensor,))
    return found[0] if found else None


def _fits(tensor: torch.Tensor, known: tuple[torch.Tensor, torch.Tensor, int | None] | None) -> bool:
    return known is not None and (known[1].shape, known[1].dtype) == (tensor.shape, tensor.dtype)


def _allocate(tensors: Sequence[torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
    """Memory for copies, in one block: a large block goes back to the system when it is freed."""
    lengths = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    block = torch.empty(sum(lengths), dtype=torch.uint8, pin_memory=pinned)
    parts = block.split(lengths)
    return [p[: t.nbytes].view(t.dtype).view(t.shape) for p, t in zip(parts, tensors, strict=True)]


def copy_all(sources: list[torch.Tensor], *, to: list[torch.Tensor]) -> None:
    """Copy in the order of the present stream, without waiting for copies between a GPU and pinned memory."""
    with torch.no_grad():
        if sources:
            torch._foreach_copy_(to, sources, non_blocking=True)
