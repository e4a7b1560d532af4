"""Refuses optimizer steps in CUDA graphs: a replay runs no hook and counts no change, so a commit would not notice the step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch

from nbelastic.errors import StateError

SAMPLES, ELEMENTS = 8, 64  # parameters, and elements of each, that are compared

ADVICE = (
    "optimizer.step() in a CUDA graph cannot be recovered: a replay runs no hook of the optimizer. Capture the forward and "
    "backward pass only, for example with torch.cuda.make_graphed_callables."
)


def refuse_capture() -> None:
    """StateError while a CUDA graph is being captured. Call it in an optimizer's hook."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise StateError(ADVICE)


class ReplayWatch:
    """Between `start` and `stop`: whether a replay has changed parameters since `clear`. It costs nothing without replays."""

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._parameters = parameters
        self._before: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # samples, and their values
        self._original: Any = None

    def start(self) -> None:
        """Watch all graphs of this process."""
        self._original = original = torch.cuda.CUDAGraph.replay

        @functools.wraps(original)
        def replay(graph: Any) -> None:
            if self._before is None:
                trained = (p.detach() for p in self._parameters() if p.requires_grad and p.is_contiguous())
                samples = [p.view(-1)[:ELEMENTS] for p in islice(trained, SAMPLES)]
                self._before = [(sample, sample.clone()) for sample in samples]
            original(graph)

        torch.cuda.CUDAGraph.replay = replay

    def stop(self) -> None:
        """End watching."""
        if self._original is not None:
            torch.cuda.CUDAGraph.replay = self._original
        self._original = None
        self.clear()

    def clear(self) -> None:
        """The present values are those of a commit."""
        self._before = None

    def refuse_changes(self) -> None:
        """StateError if a replay has changed parameters, although no step was seen. It waits for the GPU after replays."""
        if self._before and not all(torch.equal(sample, before) for sample, before in self._before):
            raise StateError(ADVICE)
