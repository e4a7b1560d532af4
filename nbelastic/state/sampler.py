"""A sampler that uses every sample of an epoch once, however often the world changes meanwhile."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sized
from numbers import Integral
from typing import Any

import torch
from torch.utils.data import Sampler, get_worker_info

from nbelastic.errors import NoWorldError, StateError, UsageError
from nbelastic.worker import session

CHUNK = 4096  # indices that are Python integers at a time: a list of ten million would take 400 MB


class ElasticSampler(Sampler[int]):  # type: ignore[misc]  # torch is not looked into
    """Gives each rank its share of what the present epoch has not used yet.

    The order is a permutation by `seed` and epoch, the same on every rank, and what all ranks have used together is
    always the beginning of it. After a change of the world the rest is shared out anew.

    - Without `global_batch`, samples go round the ranks in turn; a DataLoader's batch size is each rank's own. At the
      very end some samples are repeated so that all ranks have equally many (`drop_last`: the rest is left out).
    - With `global_batch=B`, each step uses the next B samples of the order, split among the ranks by
      `local_batch_size(B)`: the same global batches in any world. A rank for which the epoch's last batch has nothing
      gets one repeated sample of weight 0 (`drop_last`: a last batch of fewer than B is left out).

    Tell it what was *used*, after the optimizer's step: `record_batch(len(x))`. What a DataLoader fetched ahead but was
    not trained on does not count. Assign it to a `TorchState`; `set_epoch` begins a new epoch, and is harmless when a
    function that starts again from its top says the same number again. To leave out the rest of an epoch use this
    `drop_last`: a DataLoader's own would leave ranks with different numbers of batches.

    UsageError: the dataset has no length, `global_batch` is no positive integer or less than the number of ranks.
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
            raise UsageError(f"a {kind} has no length, so its samples cannot be shared out: give range(n).") from None
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = _whole("seed", seed)
        self.drop_last = drop_last
        self.global_batch = None if global_batch is None else _positive("global_batch", global_batch)
        self.epoch = 0
        self.used = 0  # samples of this epoch that all ranks have used together
        self._pickled_at = (0, 1)
        self._iterated: int | None = None  # in a DataLoader's process: the epoch that was iterated there

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, if it is not the present one."""
        if epoch != self.epoch:
            self.epoch, self.used = _whole("epoch", epoch), 0

    def record_batch(self, batch_size: int) -> None:
        """Count that this rank has used `batch_size` more samples, and each other rank its share of the same batch.

        Call it once for each optimizer step, with `len(x)`; what is over at the epoch's end does not count. With
        `global_batch` a step must use this rank's whole share: UsageError if that was another number of samples.
        """
        batch_size = _positive("batch_size", batch_size)
        rank, size = self._place()
        if self.global_batch is None:
            rest = self._rest()
            self.used += min(batch_size * size, rest - rest % size if self.drop_last else rest)
            return
        together = self._together(self.global_batch)
        self._check_share(batch_size, at_least=len(_share(together, rank, size)))
        self.used += together

    def weight(self, batch_size: int) -> float:
        """What to multiply this rank's mean loss over `batch_size` samples with, before its `record_batch`.

        DDP divides the sum of the gradients by the number of ranks. With unequal shares that is the gradient of the
        mean over the global batch only if each rank's loss is multiplied by `batch_size * size() / global batch`. If
        gradients are accumulated over the parts of a share, each part has its own weight. 0.0 for a repeated sample;
        always 1.0 without `global_batch`. UsageError if nothing of the epoch is left.
        """
        batch_size = _positive("batch_size", batch_size)
        if self.global_batch is None:
            return 1.0
        self._check_share(batch_size)
        rank, size = self._place()
        together = self._together(self.global_batch)
        if not together:
            raise UsageError(f"epoch {self.epoch} has no batch left to weigh: ask for weight() before record_batch().")
        return min(batch_size, len(_share(together, rank, size))) * size / together

    def state_dict(self) -> dict[str, Any]:
        """Plain integers: `epoch`, `used`, and the `seed` and number of `samples` that they belong to."""
        return {"epoch": self.epoch, "used": self.used, "seed": self.seed, "samples": len(self.dataset)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, and with its seed: ranks that were seeded differently agree then.

        The sampler that it was saved from may have had other options. StateError: it had another number of samples.
        """
        try:
            used, epoch, seed = int(state["used"]), int(state["epoch"]), int(state.get("seed", self.seed))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise StateError("this is no state of an ElasticSampler: give what its state_dict() returned.") from None
        count = len(self.dataset)
        if state.get("samples", count) != count or not 0 <= used <= count:
            there = state.get("samples", f"at least {used}")
            raise StateError(f"the state is of a dataset of {there} samples, this one has {count}: use the same data.")
        self.epoch, self.used, self.seed = epoch, used, seed

    def __iter__(self) -> Iterator[int]:
        """What is left for this rank, now. UsageError in a DataLoader's process that would repeat samples."""
        positions = self._positions() + self.used
        return self._one_by_one(self._order()[positions] if self.shuffle else positions)

    def __len__(self) -> int:
        """How many samples this rank has left in this epoch."""
        rank, size = self._place()
        if self.global_batch is None:
            return self._rest() // size if self.drop_last else -(-self._rest() // size)
        full, last = self._batches(self.global_batch)
        ending = max(len(_share(last, rank, size)), 1) if last else 0
        return full * len(_share(self.global_batch, rank, size)) + ending

    def __getstate__(self) -> dict[str, Any]:
        """A DataLoader's process that is no fork is in no world: it is told this one's place."""
        return {**self.__dict__, "_pickled_at": self._place()}

    def _place(self) -> tuple[int, int]:
        return _place(self._pickled_at if get_worker_info() is not None else (0, 1))

    def _rest(self) -> int:
        return len(self.dataset) - self.used

    def _batches(self, global_batch: int) -> tuple[int, int]:
        """How many full global batches are left, and how many samples the last one has besides (0: there is none)."""
        full, last = divmod(self._rest(), global_batch)
        return full, 0 if self.drop_last else last

    def _together(self, global_batch: int) -> int:
        """The number of samples in the global batch that comes next; 0 if there is none."""
        full, last = self._batches(global_batch)
        return global_batch if full else last

    def _positions(self) -> torch.Tensor:
        """Where in the rest of the order this rank's samples are: (len(self),) int64."""
        rank, size = self._place()
        if self.global_batch is None:
            return (torch.arange(len(self)) * size + rank) % max(self._rest(), 1)
        _check_enough(self.global_batch, size)
        full, last = self._batches(self.global_batch)
        share = _share(self.global_batch, rank, size)
        positions = (torch.arange(full)[:, None] * self.global_batch + torch.arange(share.start, share.stop)).flatten()
        if not last:
            return positions
        ending = list(_share(last, rank, size)) or [rank % last]  # a rank without a batch would keep the others waiting
        return torch.cat([positions, torch.tensor(ending) + full * self.global_batch])

    def _order(self) -> torch.Tensor:
        """The permutation of this epoch. torch's generator heeds 32 bits of its seed: both numbers must be in them."""
        count = len(self.dataset)
        generator = torch.Generator()
        generator.manual_seed(zlib.crc32(f"{self.seed} {self.epoch}".encode()))
        return torch.randperm(count, generator=generator, dtype=torch.int32 if count < 2**31 else torch.int64)

    def _one_by_one(self, indices: torch.Tensor) -> Iterator[int]:
        self._check_process()  # only now: an error while a DataLoader's process makes its iterator would be lost
        for part in indices.split(CHUNK):
            yield from part.tolist()

    def _check_share(self, batch_size: int, at_least: int = 1) -> None:
        """A batch of another size than this rank's share would shift all that follow: some used twice, some never."""
        assert self.global_batch is not None
        share = local_batch_size(self.global_batch)
        if not at_least <= batch_size <= share:
            raise UsageError(
                f"{batch_size} samples are not this rank's share of the global batch of {self.global_batch}, "
                f"which is {share if batch_size > share else at_least}: make the DataLoader in the elastic function, "
                f"with batch_size=nbe.local_batch_size({self.global_batch}), and record once a step."
            )

    def _check_process(self) -> None:
        """An IterableDataset takes a copy of the sampler along into each process of its DataLoader."""
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
                f"this process of a DataLoader does not know what was used of epoch {self.epoch} since it began: "
                "use persistent_workers=False, or a map-style dataset with sampler=."
            )
        self._iterated = self.epoch


def local_batch_size(global_batch: int) -> int:
    """How many samples of each global batch are this rank's in the present world; outside a world all of them.

    The first `global_batch % size()` ranks have one more than the others. The batch size for a DataLoader whose sampler
    is an `ElasticSampler(…, global_batch=global_batch)`. UsageError: it is no positive integer, or less than size().
    """
    rank, size = _place()
    global_batch = _positive("global_batch", global_batch)
    _check_enough(global_batch, size)
    return len(_share(global_batch, rank, size))


def _share(batch: int, rank: int, size: int) -> range:
    """Which samples of a batch are this rank's: next to each other, the remainder with the first ranks."""
    each, over = divmod(batch, size)
    start = rank * each + min(rank, over)
    return range(start, start + each + (rank < over))


def _place(outside: tuple[int, int] = (0, 1)) -> tuple[int, int]:
    """(rank, size); a single process outside a world has all samples to itself."""
    try:
        formation = session.world()
    except NoWorldError:
        return outside
    return formation.rank, formation.world_size


def _whole(what: str, number: Any) -> int:
    try:
        return int(number)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{what} must be a whole number, not {number!r}.") from None


def _positive(what: str, number: int) -> int:
    if not isinstance(number, Integral) or number < 1:
        raise UsageError(f"{what} must be a positive integer, not {number!r}.")
    return int(number)


def _check_enough(global_batch: int, size: int) -> None:
    if global_batch < size:
        raise UsageError(
            f"a global batch of {global_batch} cannot be split among {size} ranks: "
            f"make it at least {size}, or limit the workers with max={global_batch}."
        )
