"""A Trainer's DataLoader in an elastic job: each global batch is shared among the ranks of the present world."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from nbelastic.errors import UsageError
from nbelastic.integrations.loader_options import options_of, seed_of
from nbelastic.state.sampler import ElasticSampler, local_batch_size

PLAIN = "{what}: give the elastic fit one plain DataLoader with a batch_size, shuffled or not, over a dataset with a length."


class SharedBatches:
    """The batches of an epoch, of which this rank gets its share. Lightning takes it for a loader that it need not change."""

    def __init__(self, loader: Any, sampler: ElasticSampler, progress: Any = None) -> None:
        self.sampler, self.batch_size = sampler, sampler.global_batch
        self.dataset = sampler.dataset  # modules and callbacks ask `trainer.train_dataloader` for it
        self._loader = loader
        self._progress = progress  # how many batches Lightning has begun, processed and completed
        self._shares: Any = None  # the DataLoader of the present world

    def __iter__(self) -> Iterator[Any]:
        """Begin at the first batch that is asked for: Lightning sets the epoch after it has made the iterator."""
        if self._shares is None:
            assert self.sampler.global_batch is not None
            options = {**options_of(self._loader), "generator": torch.Generator()}
            size = local_batch_size(self.sampler.global_batch)
            self._shares = DataLoader(self._loader.dataset, batch_size=size, sampler=self.sampler, **options)
        self._shares.generator.manual_seed(seed_of(self.sampler.seed, self.sampler.epoch, self.sampler.used))
        yield from self._shares

    def __len__(self) -> int:
        """Of the whole epoch: Lightning compares it with the batches that the epoch has had."""
        samples, batch = len(self.sampler.dataset), self.sampler.global_batch
        assert batch is not None
        return samples // batch if self.sampler.drop_last else -(-samples // batch)

    def state_dict(self) -> dict[str, Any]:
        """So that Lightning's own checkpoints resume in the middle of an epoch.

        Callbacks save them in `on_train_batch_end`. Lightning counts the batch as done there, which is not recorded yet.
        """
        state = self.sampler.state_dict()
        if self._progress is not None and self._progress.current.processed > self._progress.current.completed:
            state["used"] += sum(self.sampler.shares(self.sampler.next_share()))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)


class SharedSource(_DataLoaderSource):  # type: ignore[misc]  # mypy does not follow lightning
    """Where a Trainer's loop gets its training data from: the user's loader, shared among the ranks."""

    loader: Any = None
    sampler: Any = None
    progress: Any = None

    def dataloader(self) -> SharedBatches:
        if self.sampler is None:
            self.loader = super().dataloader()
            self.sampler = _sampler_for(self.loader)
        return SharedBatches(self.loader, self.sampler, self.progress)


def _sampler_for(loader: Any) -> ElasticSampler:
    if type(loader) is not DataLoader:
        raise UsageError(PLAIN.format(what=f"a {type(loader).__name__} cannot be shared among ranks"))
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        raise UsageError(PLAIN.format(what="a stream or a batch sampler cannot be shared among ranks"))
    shuffle = isinstance(sampler, RandomSampler) or (isinstance(sampler, DistributedSampler) and sampler.shuffle)
    if type(sampler) not in (RandomSampler, SequentialSampler, DistributedSampler) or getattr(
        sampler, "replacement", False
    ):
        raise UsageError(PLAIN.format(what=f"the samples of a {type(sampler).__name__} cannot be shared among ranks"))
    if type(sampler) is not DistributedSampler and len(sampler) != len(loader.dataset):
        raise UsageError(PLAIN.format(what=f"an epoch cannot have {len(sampler)} of {len(loader.dataset)} samples"))
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # as Lightning's own samplers
    return ElasticSampler(
        loader.dataset, shuffle=shuffle, seed=seed, drop_last=loader.drop_last, global_batch=loader.batch_size
    )
