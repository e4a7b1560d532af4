"""What the loaders of all frameworks share: options of the user's loader, and the seeds of a DataLoader's processes."""

from __future__ import annotations

import zlib
from typing import Any

from nbelastic.state.sampler import rank_and_size

OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


def options_of(loader: Any) -> dict[str, Any]:
    """What an elastic loader takes from the user's one, beside its data set, sampler and batch size."""
    return {name: getattr(loader, name) for name in OPTIONS if hasattr(loader, name)}


def seed_of(*place: int) -> int:
    """A seed for the generator of a DataLoader on this rank, another one at each place in the training.

    A DataLoader without a generator of its own draws its seeds from the generator of the training.
    """
    rank, _ = rank_and_size()
    return zlib.crc32(" ".join(map(str, (*place, rank))).encode())
