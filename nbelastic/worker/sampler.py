"""A sampler that uses every sample of an epoch once, however often the world changes meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from nbelastic.core.errors import NoWorldError
from nbelastic.worker import session


class ElasticSampler(Sampler[int]):  # type: ignore[misc]  # torch is not looked into
    """Gives each rank its share of what the present epoch has not used yet.

    The order is a permutation by `seed` and epoch, the same on every rank; the samples go round the ranks in turn, so
    that what all ranks have used together is always the beginning of it. After a change of the world the rest is shared
    out anew. At the very end some samples are repeated so that all ranks have equally many.

    Tell it what was *used*, after the optimizer's step: `record_batch(batch_size)`. What a DataLoader fetched ahead but
    was not trained on does not count. Assign it to a `TorchState`; `set_epoch` begins a new epoch, and is harmless when
    a function that starts again from its top says the same number again.
    """

    def __init__(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.used = 0  # samples of this epoch that all ranks have used together

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, if it is not the present one."""
        if epoch != self.epoch:
            self.epoch, self.used = epoch, 0

    def record_batch(self, batch_size: int) -> None:
        """Each rank has used `batch_size` more samples (fewer at the epoch's end: what is over does not count)."""
        _, size = _place()
        self.used = min(self.used + batch_size * size, len(self.dataset))

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "used": self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.used = int(state["epoch"]), int(state["used"])

    def __iter__(self) -> Iterator[int]:
        rank, size = _place()
        rest = self._order()[self.used :]
        if not rest:
            return iter(())
        missing = -len(rest) % size
        padding = (rest * (missing // len(rest) + 1))[:missing]
        return iter((rest + padding)[rank::size])

    def __len__(self) -> int:
        """How many samples this rank has left in this epoch."""
        _, size = _place()
        return math.ceil((len(self.dataset) - self.used) / size)

    def _order(self) -> list[int]:
        count = len(self.dataset)
        if not self.shuffle:
            return list(range(count))
        generator = torch.Generator()
        generator.manual_seed((self.seed << 20) + self.epoch)
        return list(torch.randperm(count, generator=generator).tolist())


def _place() -> tuple[int, int]:
    """(rank, size); a single process outside a world has all samples to itself."""
    try:
        formation = session.world()
    except NoWorldError:
        return 0, 1
    return formation.rank, formation.world_size
