"""Reads shards in a DataLoader, whose batches name the samples that are in them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert, get_worker_info
from torch.utils.data._utils import worker as loader_process

from nbelastic.errors import StateError, UsageError

Row = tuple[int, int, bool]  # a shard's number, how many samples of it are in a batch, whether they are its last
Tagged = tuple[int, bool, Any]  # a shard's number, whether the sample is its last, the sample
END = object()
OURS = ("dataset", "sampler", "batch_sampler", "shuffle")
REFUSED = {
    "drop_last": "it would leave out samples: a last, smaller batch has a weight()",
    "persistent_workers": "after a change of the world its processes would go on with the old shards",
}


class ShardReader:
    """Calls the program's `open_shard` with as many of `offset` and `epoch` as it takes."""

    def __init__(self, open_shard: Callable[..., Iterable[Any]]) -> None:
        self._open_shard = open_shard
        try:
            self._takes = {"offset", "epoch"} & inspect.signature(open_shard).parameters.keys()
        except (TypeError, ValueError):  # a built-in function
            self._takes = set()

    def read(self, shard: Any, offset: int, epoch: int) -> Iterator[Any]:
        """The samples from `offset` on. StateError if the shard ends before."""
        arguments = {"offset": offset, "epoch": epoch}
        samples = iter(self._open_shard(shard, **{name: arguments[name] for name in self._takes}))
        if "offset" not in self._takes:
            for skipped in range(offset):
                if next(samples, END) is END:
                    raise StateError(
                        f"{offset} samples of the shard {shard!r} were used, and now it has only {skipped}: open_shard "
                        "must give the same samples in the same order each time in an epoch."
                    )
        return samples


class Lane(IterableDataset[Tagged]):  # type: ignore[misc]  # mypy does not follow torch
    """The shards of one rank: (number, shard, offset). Each of a DataLoader's processes reads some of them, one by one."""

    def __init__(self, reader: ShardReader, shards: list[tuple[int, Any, int]], epoch: int) -> None:
        self._reader = reader
        self._shards = shards
        self._epoch = epoch

    def __iter__(self) -> Iterator[Tagged]:
        process = get_worker_info()
        mine = self._shards if process is None else self._shards[process.id :: process.num_workers]
        with _alone():
            for number, shard, offset in mine:
                samples = self._reader.read(shard, offset, self._epoch)
                sample = next(samples, END)
                while sample is not END:
                    following = next(samples, END)
                    yield number, following is END, sample
                    sample = following


@contextmanager
def _alone() -> Iterator[None]:
    """Datasets that share out their samples among a DataLoader's processes by themselves find no such process."""
    process, loader_process._worker_info = loader_process._worker_info, None
    try:
        yield
    finally:
        loader_process._worker_info = process


class Collate:
    """Makes a batch of tagged samples: its rows, and what the program's `collate_fn` makes of the samples."""

    def __init__(self, collate: Callable[[Any], Any], *, single: bool) -> None:
        self.samples = collate
        self._single = single

    def __call__(self, tagged: Any) -> tuple[list[Row], Any]:
        if self._single:
            number, ended, sample = tagged
            return [(number, 1, ended)], self.samples(sample)
        return rows_of(tagged), self.samples([sample for _, _, sample in tagged])


def rows_of(tagged: list[Tagged]) -> list[Row]:
    """How many samples of each shard are in a batch, in the order of the shards."""
    rows = []
    for number, group in itertools.groupby(tagged, key=lambda one: one[0]):
        ends = [ended for _, ended, _ in group]
        rows.append((number, len(ends), ends[-1]))
    return rows


def make_loader(lane: Lane, batch_size: int | None, options: dict[str, Any]) -> DataLoader[tuple[list[Row], Any]]:
    """A DataLoader of (rows, batch)."""
    return DataLoader(lane, batch_size, **options | {"collate_fn": collation(batch_size, options)})


def collation(batch_size: int | None, options: dict[str, Any]) -> Collate:
    single = batch_size is None
    return Collate(options.get("collate_fn") or (default_convert if single else default_collate), single=single)


def check_options(options: dict[str, Any]) -> None:
    """UsageError for options of a DataLoader that would lose samples."""
    for name, value in options.items():
        if name in OURS:
            raise UsageError(f"the stream itself decides which samples a rank gets: leave out {name}=.")
        if name in REFUSED and value:
            raise UsageError(f"leave out {name}= of the stream's loader: {REFUSED[name]}.")
