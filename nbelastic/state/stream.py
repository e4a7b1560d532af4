"""A stream of samples in shards, each used once per epoch, through any number of changes of the world."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist

from nbelastic.errors import StateError, UsageError
from nbelastic.state.sampler import positive_number, rank_and_size, whole_number
from nbelastic.state.shard_reader import Lane, Row, ShardReader, check_options, collation, make_loader
from nbelastic.worker import session

FORGOTTEN = 64  # batches that were given and not recorded, after which the loop has no record_batch()
Step = list[list[Row]]  # by rank: the samples of its batch


class ElasticStream:
    """Shares out the shards of a stream among the ranks, and holds how many samples of each shard all ranks have used.

    `open_shard(shard)` returns the samples of one of `shards`, from its beginning, as an iterable. It may also take
    `offset`, the number of samples to leave out, and `epoch`: `def open_shard(path, offset, epoch)`. Without `offset`,
    the samples before a position are read and dropped. Within an epoch it must give the same samples in the same order
    each time. The number of samples in a shard need not be known.

    Give the stream to a state, and iterate `loader(batch_size)` inside the elastic function. All ranks get the same
    number of batches. Call `record_batch()` for each, after the optimizer's step. A rank that has no samples left gets a repeated
    batch of weight 0 while others still have some: multiply the loss by `weight()`.

    A streaming dataset of Hugging Face is given alone: `ElasticStream(dataset)`.

    UsageError if there are no shards, or `open_shard` is missing or is not callable.
    """

    def __init__(
        self,
        shards: Iterable[Any],
        open_shard: Callable[..., Iterable[Any]] | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if open_shard is None:
            shards, open_shard = _shards_of(shards)
        if not callable(open_shard):
            raise UsageError(f"open_shard must be a function that returns the samples of a shard, not {open_shard!r}.")
        self.shards = list(shards)
        if not self.shards:
            raise UsageError("a stream has at least one shard: give a list of file names or numbers.")
        self.shuffle = shuffle
        self.seed = whole_number("seed", seed)
        self.epoch = 0
        self.iteration = 0  # changes when the loaders that are being iterated are outdated
        self._reader = ShardReader(open_shard)
        self._positions = torch.zeros(len(self.shards), dtype=torch.int64)  # used samples n; -1 - n: there are no more
        self._given: deque[Step] = deque()  # batches that were given and not recorded
        self._has_recorded = False

    @property
    def used(self) -> int:
        """The number of samples that all ranks have used together in this epoch."""
        positions = self._positions
        return int(torch.where(positions < 0, -1 - positions, positions).sum())

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, unless it is the present one."""
        epoch = whole_number("epoch", epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self._positions.zero_()
            self.begin_iteration()

    def loader(self, batch_size: int | None = 1, *, ahead: int = 1, **options: Any) -> StreamLoader:
        """The batches of this rank: samples that the epoch has not used yet. Iterate it in the elastic function.

        `options` are those of a DataLoader, such as `num_workers` and `collate_fn`. Each rank reads only its own shards, and
        each of the DataLoader's processes only some of those. The last batch of a process may be smaller. `batch_size=None`:
        the shards give whole batches, which count as one sample each.

        Each rank sends the others which samples it uses: one small collective for every `ahead` batches, which are held in
        memory. UsageError for `drop_last` and other options that would lose samples.
        """
        return StreamLoader(self, self._reader, batch_size, ahead, options)

    def record_batch(self) -> None:
        """Count the batches that all ranks got together as used: the oldest not recorded. Call it once per batch.

        Batches that were given and are not recorded at a commit are given again after a break. UsageError if no batch
        was given.
        """
        if not self._given:
            raise UsageError(
                "no batch is left to record: call record_batch() once for each batch of the stream's loader."
            )
        for rows in self._given.popleft():
            for shard, samples, ended in rows:
                position = int(self._positions[shard]) + samples
                self._positions[shard] = -1 - position if ended else position
        self._has_recorded = True

    def weight(self, batch_size: int | None = None) -> float:
        """The factor for this rank's mean loss over the oldest batch that is not recorded; ask before `record_batch`.

        DDP divides the sum of the gradients by the number of ranks. If ranks have unequally many samples, that is the
        gradient of the mean over all of them only with this factor. `batch_size`: the factor for a part of the batch of
        so many samples. A repeated batch has weight 0.0. UsageError if no batch was given.
        """
        if not self._given:
            raise UsageError("no batch is left to weigh: ask for weight() before record_batch().")
        counts = [sum(samples for _, samples, _ in rows) for rows in self._given[0]]
        mine = counts[rank_and_size()[0]]
        return min(mine if batch_size is None else batch_size, mine) * len(counts) / sum(counts)

    def state_dict(self) -> dict[str, Any]:
        """`epoch`, `seed`, a checksum of the shards' names, and the position in each shard: (number of shards,) int64."""
        positions = self._positions.clone()
        return {"epoch": self.epoch, "seed": self.seed, "names": self._names(), "positions": positions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at these positions, with that seed. StateError if they belong to other shards."""
        try:
            epoch, seed, names = int(state["epoch"]), int(state["seed"]), int(state["names"])
            positions = state["positions"].to(torch.int64).cpu()
        except (AttributeError, KeyError, TypeError, ValueError):
            raise StateError("this is not a state of an ElasticStream: give what its state_dict() returned.") from None
        if len(positions) != len(self.shards):
            raise StateError(
                f"the state belongs to {len(positions)} shards, and this stream has {len(self.shards)}: use the same data."
            )
        if names != self._names():
            raise StateError(
                "the state belongs to shards of other names or in another order: give the same list on every rank. "
                "A folder's files have no order: sort them."
            )
        if (epoch, seed) != (self.epoch, self.seed) or not torch.equal(positions, self._positions):
            self.epoch, self.seed = epoch, seed
            self._positions.copy_(positions)
            self.begin_iteration()

    def begin_iteration(self) -> int:
        """Forget batches that were given and not recorded: a loader begins at the positions. Its number."""
        self._given.clear()
        self._has_recorded = False
        self.iteration += 1
        return self.iteration

    def remaining(self) -> list[tuple[int, int]]:
        """(shard's number, position) of each shard that may have more samples, in the order of this epoch."""
        count = len(self.shards)
        order = range(count)
        if self.shuffle:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {self.epoch}".encode()))
            order = torch.randperm(count, generator=generator).tolist()
        positions = self._positions.tolist()
        return [(number, positions[number]) for number in order if positions[number] >= 0]

    def give(self, step: Step) -> None:
        """The ranks are about to get these batches."""
        if len(self._given) >= FORGOTTEN:
            raise self._forgotten()
        self._given.append(step)

    def end_epoch(self) -> None:
        """No rank has a sample left. UsageError if the loop records nothing."""
        if len(self._given) > 2 and not self._has_recorded:
            raise self._forgotten()

    def _forgotten(self) -> UsageError:
        return UsageError(
            f"{len(self._given)} batches of the stream were given and not recorded, so they would be used again: "
            "call record_batch() once for each batch, after the optimizer's step."
        )

    def _names(self) -> int:
        """A checksum of the shards' names; 0 if they have none that all processes agree on."""
        if all(isinstance(shard, (str, int, bytes, PurePath)) for shard in self.shards):
            return zlib.crc32("\0".join(map(str, self.shards)).encode(errors="surrogateescape"))
        return 0


class StreamLoader:
    """A rank's batches of a stream. Each iteration begins with the samples that are not recorded as used."""

    def __init__(
        self, stream: ElasticStream, reader: ShardReader, batch_size: int | None, ahead: int, options: dict[str, Any]
    ) -> None:
        check_options(options)
        self._stream = stream
        self._reader = reader
        self._batch_size = batch_size if batch_size is None else positive_number("batch_size", batch_size)
        self._ahead = positive_number("ahead", ahead)
        self._options = options

    def __iter__(self) -> Iterator[Any]:
        stream = self._stream
        iteration = stream.begin_iteration()
        rank, size = rank_and_size()
        remaining = stream.remaining()
        shards = [(number, stream.shards[number], position) for number, position in remaining[rank::size]]
        lane = Lane(self._reader, shards, stream.epoch)
        batches = iter(make_loader(lane, self._batch_size, self._options))
        batch: Any = None
        while True:
            mine = list(islice(batches, self._ahead))
            steps = in_steps(exchange([rows for rows, _ in mine], self._ahead))
            if not steps:
                stream.end_epoch()
                return
            for number, step in enumerate(steps):
                if number < len(mine):
                    batch = mine[number][1]
                elif batch is None:
                    batch = self._filler(remaining, rank)
                stream.give(step)
                yield batch
                if stream.iteration != iteration:
                    raise UsageError(
                        "the stream has another position than this loop: set_epoch(), restore() or another loop has begun. "
                        "Begin this loop anew."
                    )

    def _filler(self, remaining: list[tuple[int, int]], rank: int) -> Any:
        """A batch of one sample, for a rank that never had any: its forward pass must not block the others."""
        stream, at = self._stream, rank % len(remaining)
        for number, position in remaining[at:] + remaining[:at]:
            for sample in self._reader.read(stream.shards[number], position, stream.epoch):
                collate = collation(self._batch_size, self._options)
                return collate.samples(sample if self._batch_size is None else [sample])
        raise StateError(
            "other ranks have samples of shards that give none here: open_shard must give the same on each rank."
        )


def in_steps(batches: Sequence[list[list[Row]]]) -> list[Step]:
    """By step the rows of all ranks, from the rows of each rank's batches; a rank without a batch has no rows."""
    steps = max(map(len, batches))
    return [[theirs[step] if step < len(theirs) else [] for theirs in batches] for step in range(steps)]


def exchange(mine: list[list[Row]], ahead: int) -> list[list[list[Row]]]:
    """Collective: the rows of all ranks' batches. One small message per rank; a longer one if a batch has many shards."""
    _, size = rank_and_size()
    if size == 1:
        return [mine]
    numbers = [len(mine)]
    for rows in mine:
        numbers += [len(rows), *(number for row in rows for number in row)]
    received = _gather(numbers, 8 * ahead, size)
    longest = max(length for length, *_ in received)
    if longest > 8 * ahead:
        received = _gather(numbers, longest, size)
    return [_parse(one) for one in received]


def _gather(numbers: list[int], width: int, size: int) -> list[list[int]]:
    """The numbers of all ranks, after their count; those beyond `width` are cut off."""
    sent = torch.zeros(width + 1, dtype=torch.int64)
    sent[: len(numbers) + 1] = torch.tensor([len(numbers), *numbers[:width]])
    received = torch.empty(size * len(sent), dtype=torch.int64)
    dist.all_gather_into_tensor(received, sent)
    if dist.group.WORLD._get_backend(sent.device).name() != "gloo":  # an abort may leave garbage, without an error
        session.current().check(sent.device)  # it waits for the GPU, which gloo does not need
    return [one.tolist() for one in received.split(len(sent))]


def _parse(received: list[int]) -> list[list[Row]]:
    numbers = iter(received[1:])
    return [
        [(next(numbers), next(numbers), bool(next(numbers))) for _ in range(next(numbers))]
        for _ in range(next(numbers))
    ]


def _shards_of(dataset: Any) -> tuple[Iterable[int], Callable[..., Iterable[Any]]]:
    """The shards of a streaming dataset of Hugging Face."""
    if not (hasattr(dataset, "num_shards") and hasattr(dataset, "skip") and hasattr(dataset, "set_epoch")):
        raise UsageError(
            f"give ElasticStream(shards, open_shard): {type(dataset).__name__} is not a streaming dataset of Hugging Face."
        )
    count = dataset.num_shards

    def open_shard(shard: int, offset: int, epoch: int) -> Iterable[Any]:
        part: Any = dataset.shard(num_shards=count, index=shard)
        part = part.skip(offset) if offset else part
        part.set_epoch(epoch)  # the parts do not have the dataset's own
        return part  # type: ignore[no-any-return]

    return range(count), open_shard
