"""A sampler that uses every sample of an epoch once, through any number of changes of the world."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sized
from numbers import Integral
from typing import Any

import torch
from torch.utils.data import Sampler, get_worker_info

from nbelastic.errors import NoWorldError, StateError, UsageError
from nbelastic.worker import session

CHUNK = 4096  # indices that are Python integers at the same time: a list of ten million would take 400 MB


class ElasticSampler(Sampler[int]):  # type: ignore[misc]  # mypy does not follow torch
    """Gives each rank its share of the samples that the present epoch has not used yet.

    The order is a permutation by `seed` and epoch, the same on every rank. The samples that all ranks have used together
    are always the beginning of it. After a change of the world, the ranks share the rest.

    - Without `global_batch`, samples are dealt to the ranks one by one; a DataLoader's batch size is each rank's own. At the
      end some samples are repeated, so that all ranks have equally many (with `drop_last` the rest is left out).
    - With `global_batch=B`, each step uses the next B samples of the order, split among the ranks by
      `local_batch_size(B)`: the same global batches in any world. A rank without a sample in the epoch's last batch
      gets one repeated sample of weight 0. With `drop_last`, a last batch of fewer than B is left out.

    After the optimizer's step, record the samples that were *used*: `record_batch(len(x))`. Samples that a DataLoader has
    fetched in advance do not count. Give the sampler to a `TorchState`. `set_epoch` begins a new epoch; the present
    epoch's number changes nothing, so a function may call it each time it starts again. To leave out the rest of an epoch
    use this `drop_last`: with a DataLoader's own, ranks would have different numbers of batches.

    UsageError if the dataset has no length, or `global_batch` is not a positive integer or is less than the world size.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        global_batch: int | None = None,
    ) -> None:
        try:
            len(dataset)
        except (TypeError, NotImplementedError):
            kind = type(dataset).__name__
            raise UsageError(f"a {kind} has no length, so the ranks cannot share its samples: give range(n).") from None
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = whole_number("seed", seed)
        self.drop_last = drop_last
        self.global_batch = None if global_batch is None else positive_number("global_batch", global_batch)
        self.epoch = 0
        self.used = 0  # samples of this epoch that all ranks have used together
        self._pickled_at = (0, 1)
        self._iterated: int | None = None  # in a DataLoader's process: the epoch that was iterated there

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, unless it is the present one."""
        epoch = whole_number("epoch", epoch)
        if epoch != self.epoch:
            self.epoch, self.used = epoch, 0

    def record_batch(self, batch_size: int) -> None:
        """Count that this rank has used `batch_size` more samples, and each other rank its share of the same batch.

        Call it once per optimizer step, with `len(x)`; repeated samples at the epoch's end do not count. With
        `global_batch`, a step must use this rank's whole share: UsageError for another number of samples.
        """
        batch_size = positive_number("batch_size", batch_size)
        rank, size = self._rank_and_size()
        if self.global_batch is None:
            remaining = self._remaining()
            self.used += min(batch_size * size, remaining - remaining % size if self.drop_last else remaining)
            return
        samples = self._next_batch(self.global_batch)
        self._check_share(batch_size, at_least=len(share_of(samples, rank, size)))
        self.used += samples

    def weight(self, batch_size: int) -> float:
        """The factor for this rank's mean loss over `batch_size` samples; ask for it before `record_batch`.

        DDP divides the sum of the gradients by the number of ranks. With unequal shares that is the gradient of the
        mean over the global batch only if each rank's loss is multiplied by `batch_size * size() / global batch`. If
        gradients are accumulated over the parts of a share, each part has its own weight. A repeated sample has weight
        0.0; without `global_batch` the weight is always 1.0. UsageError if the epoch has no samples left.
        """
        batch_size = positive_number("batch_size", batch_size)
        if self.global_batch is None:
            return 1.0
        self._check_share(batch_size)
        rank, size = self._rank_and_size()
        samples = self._next_batch(self.global_batch)
        if not samples:
            raise UsageError(f"epoch {self.epoch} has no batch left to weigh: ask for weight() before record_batch().")
        return min(batch_size, len(share_of(samples, rank, size))) * size / samples

    def next_share(self) -> int:
        """The number of samples that this rank uses in the next global batch; 1 at least, as a repeated sample counts."""
        assert self.global_batch is not None
        rank, size = self._rank_and_size()
        return max(len(share_of(self._next_batch(self.global_batch), rank, size)), 1)

    def shares(self, batch_size: int) -> list[int]:
        """How many samples of each rank's next batch count, which has at most `batch_size`. Repeated ones do not."""
        _, size = self._rank_and_size()
        if self.global_batch is not None:
            samples = self._next_batch(self.global_batch)
            return [len(share_of(samples, rank, size)) for rank in range(size)]
        left = self._remaining() - (self._remaining() % size if self.drop_last else 0)
        return [len(range(rank, left, size)[:batch_size]) for rank in range(size)]

    def state_dict(self) -> dict[str, Any]:
        """Integers: `epoch`, `used`, and the `seed` and number of `samples` that they belong to."""
        return {"epoch": self.epoch, "used": self.used, "seed": self.seed, "samples": len(self.dataset)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at that position, with that seed: then ranks with different seeds agree.

        The saved sampler may have had other options. StateError if it had another number of samples.
        """
        try:
            used, epoch, seed = int(state["used"]), int(state["epoch"]), int(state.get("seed", self.seed))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise StateError("this is not a state of an ElasticSampler: give what its state_dict() returned.") from None
        count = len(self.dataset)
        if state.get("samples", count) != count or not 0 <= used <= count:
            there = state.get("samples", f"at least {used}")
            raise StateError(
                f"the state belongs to a dataset of {there} samples, and this one has {count}: use the same data."
            )
        self.epoch, self.used, self.seed = epoch, used, seed

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's remaining samples. UsageError in a DataLoader's process that would repeat samples."""
        positions = self._positions() + self.used
        return self._iterate(self._order()[positions] if self.shuffle else positions)

    def __len__(self) -> int:
        """How many samples this rank has left in this epoch."""
        rank, size = self._rank_and_size()
        if self.global_batch is None:
            return self._remaining() // size if self.drop_last else -(-self._remaining() // size)
        full, last = self._batches(self.global_batch)
        last_share = max(len(share_of(last, rank, size)), 1) if last else 0
        return full * len(share_of(self.global_batch, rank, size)) + last_share

    def __getstate__(self) -> dict[str, Any]:
        """A spawned DataLoader process is in no world: it gets the rank and size of this process."""
        return {**self.__dict__, "_pickled_at": self._rank_and_size()}

    def _rank_and_size(self) -> tuple[int, int]:
        return rank_and_size(self._pickled_at if get_worker_info() is not None else (0, 1))

    def _remaining(self) -> int:
        return len(self.dataset) - self.used

    def _batches(self, global_batch: int) -> tuple[int, int]:
        """The number of full global batches that remain, and of samples in the last, smaller one (0: there is none)."""
        full, last = divmod(self._remaining(), global_batch)
        return full, 0 if self.drop_last else last

    def _next_batch(self, global_batch: int) -> int:
        """The number of samples in the next global batch; 0 if there is none."""
        full, last = self._batches(global_batch)
        return global_batch if full else last

    def _positions(self) -> torch.Tensor:
        """The positions of this rank's samples in the remaining order: (len(self),) int64."""
        rank, size = self._rank_and_size()
        if self.global_batch is None:
            return (torch.arange(len(self)) * size + rank) % max(self._remaining(), 1)
        _check_enough(self.global_batch, size)
        full, last = self._batches(self.global_batch)
        share = share_of(self.global_batch, rank, size)
        positions = (torch.arange(full)[:, None] * self.global_batch + torch.arange(share.start, share.stop)).flatten()
        if not last:
            return positions
        last_share = list(share_of(last, rank, size)) or [rank % last]  # a rank without a batch would block the others
        return torch.cat([positions, torch.tensor(last_share) + full * self.global_batch])

    def _order(self) -> torch.Tensor:
        """The permutation of this epoch. torch's generator uses 32 bits of its seed, so both numbers must be in them."""
        count = len(self.dataset)
        generator = torch.Generator()
        generator.manual_seed(zlib.crc32(f"{self.seed} {self.epoch}".encode()))
        return torch.randperm(count, generator=generator, dtype=torch.int32 if count < 2**31 else torch.int64)

    def _iterate(self, indices: torch.Tensor) -> Iterator[int]:
        self._check_process()  # here: a DataLoader loses an error that its process raises while it makes the iterator
        for part in indices.split(CHUNK):
            yield from part.tolist()

    def _check_share(self, batch_size: int, at_least: int = 1) -> None:
        """A batch of another size would shift all later ones: some samples would be used twice, some never."""
        assert self.global_batch is not None
        share = local_batch_size(self.global_batch)
        if not at_least <= batch_size <= share:
            raise UsageError(
                f"{batch_size} samples are not this rank's share of the global batch of {self.global_batch}, "
                f"which is {share if batch_size > share else at_least}: make the DataLoader in the elastic function, "
                f"with batch_size=nbe.local_batch_size({self.global_batch}), and record once per step."
            )

    def _check_process(self) -> None:
        """UsageError if samples would be repeated: each process of a DataLoader has a copy of an IterableDataset's sampler."""
        loader = get_worker_info()
        if loader is None:
            return
        if loader.num_workers > 1:
            raise UsageError(
                f"each of the DataLoader's {loader.num_workers} processes would give the same samples: "
                "use num_workers=1, or a map-style dataset with sampler=."
            )
        if self._iterated == self.epoch:
            raise UsageError(
                f"this process of a DataLoader does not know which samples of epoch {self.epoch} were used since it began: "
                "use persistent_workers=False, or a map-style dataset with sampler=."
            )
        self._iterated = self.epoch


def local_batch_size(global_batch: int) -> int:
    """The number of samples of each global batch for this rank in the present world; outside a world all of them.

    It is the batch size for a DataLoader whose sampler is an `ElasticSampler(…, global_batch=global_batch)`. The first
    `global_batch % size()` ranks get one more than the others. UsageError if `global_batch` is not a positive integer, or
    is less than size().
    """
    rank, size = rank_and_size()
    global_batch = positive_number("global_batch", global_batch)
    _check_enough(global_batch, size)
    return len(share_of(global_batch, rank, size))


def share_of(batch: int, rank: int, size: int) -> range:
    """Return this rank's samples of a batch: neighbours; the first ranks get one more if the batch does not divide evenly."""
    each, over = divmod(batch, size)
    start = rank * each + min(rank, over)
    return range(start, start + each + (rank < over))


def rank_and_size(outside: tuple[int, int] = (0, 1)) -> tuple[int, int]:
    """(rank, size); outside a world `outside`."""
    try:
        formation = session.world()
    except NoWorldError:
        return outside
    return formation.rank, formation.world_size


def whole_number(what: str, number: Any) -> int:
    try:
        whole = int(number)
        if isinstance(number, str) or whole == number:
            return whole
    except (TypeError, ValueError, OverflowError):
        pass
    raise UsageError(f"{what} must be a whole number, not {number!r}.")


def positive_number(what: str, number: int) -> int:
    if not isinstance(number, Integral) or number < 1:
        raise UsageError(f"{what} must be a positive integer, not {number!r}.")
    return int(number)


def _check_enough(global_batch: int, size: int) -> None:
    if global_batch < size:
        raise UsageError(
            f"a global batch of {global_batch} cannot be split among {size} ranks: "
            f"make it at least {size}, or limit the workers with max={global_batch}."
        )
