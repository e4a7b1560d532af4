"""Splits each global batch among the ranks, and a rank's share into parts that fit its device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from itertools import islice

from torch.utils.data import Sampler

from nbelastic.errors import UsageError
from nbelastic.state.sampler import ElasticSampler, share_of
from nbelastic.worker import ranks


class GlobalBatches(Sampler[list[int]]):  # type: ignore[misc]  # mypy does not follow torch
    """The batch sampler of this rank in the present world. It yields the parts of one step after the other.

    Step n of an epoch has the same samples in any world: its global batch, split among the ranks. All ranks split their
    shares into equally many parts of at most `part` samples. A part without a sample repeats one, whose weight is 0.

    `skipped`: the number of parts at the epoch's beginning that are yielded empty, as they were used already.
    """

    def __init__(self, dataset: Sized, batch: int, part: int, *, shuffle: bool, seed: int, drop_last: bool) -> None:
        self._sampler = ElasticSampler(dataset, shuffle=shuffle, seed=seed, drop_last=drop_last, global_batch=batch)
        self._batch, self._rank, self._size = batch, ranks.rank(), ranks.size()
        self.parts = math.ceil(math.ceil(batch / self._size) / part)  # of each step, also of the last one
        self.epoch = self.skipped = 0
        full, last = divmod(len(dataset), batch)
        self._last = 0 if drop_last else last
        self._full = full
        if not self:
            raise UsageError(
                f"the {len(dataset)} samples are fewer than a global batch of {batch}, and incomplete batches are dropped."
            )

    def samples(self, step: int) -> int:
        """How many samples all ranks use together in this step of an epoch."""
        return self._batch if step < self._full else self._last

    def sizes(self, step: int) -> list[int]:
        """How many samples each part of this rank has in this step; 0 for a part that repeats one."""
        share = len(share_of(self.samples(step), self._rank, self._size))
        return [len(share_of(share, part, self.parts)) for part in range(self.parts)]

    def __len__(self) -> int:
        """The number of parts in an epoch."""
        return (self._full + bool(self._last)) * self.parts

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([] for _ in range(self.skipped))
        first = self.skipped // self.parts
        self._sampler.set_epoch(self.epoch)
        self._sampler.used = min(first * self._batch, len(self._sampler.dataset))
        indices = iter(self._sampler)
        for step in range(first, self._full + bool(self._last)):
            sizes = self.sizes(step)
            share = list(islice(indices, max(sum(sizes), 1)))
            start = 0
            for size in sizes:
                yield share[start : start + size] or share[:1]
                start += size
