"""Many real workers on this machine: `python -m tests.benchmarks.many [--json FILE] [--quick] [--only 8 32 64]`.

For each number of workers:
- `next`, `full`, `lost`: one is killed; as in `recovery`.
- `bare group`, `bare step`: the survivors' part without nbelastic, by as many processes that live already: they form a group
  of gloo, and make the first step in it. Measured just before, while nothing trains.
- `over bare`: how much longer than both the median kill takes.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from tests.benchmarks import programs, recovery
from tests.benchmarks.bare import processes

SIZES = (8, 32, 64)


class Forming:
    """Each round forms a group and makes a step with DDP."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank
        self._model, self._optimizer = programs.model_and_optimizer()

    def round(self, store: Any, ready: Callable[[], object]) -> list[tuple[str, float]]:
        import torch
        import torch.distributed as dist

        ready()
        marks = [("begun", time.time())]
        dist.init_process_group(
            "gloo", store=store, rank=self._rank, world_size=self._size, timeout=timedelta(seconds=60)
        )
        marks.append(("group", time.time()))
        ddp = torch.nn.parallel.DistributedDataParallel(self._model, init_sync=False)
        programs.one_step(ddp, self._optimizer)
        marks.append(("step", time.time()))
        dist.barrier()
        dist.destroy_process_group()
        return marks


def one_size(size: int, count: int) -> dict[str, list[float]]:
    """Form bare groups of the survivors, then kill workers of a training of `size`; return the times."""
    found: dict[str, list[float]] = {"bare group": [], "bare step": []}
    with processes(partial(Forming, size - 1), size - 1) as form:
        for _ in range(count):
            marks = form()
            begun, formed = (max(rank[name] for rank in marks) for name in ("begun", "group"))
            found["bare group"].append(formed - begun)
            found["bare step"].append(min(rank["step"] for rank in marks) - formed)
    found |= recovery.faults(signal.SIGKILL, count, 2.0, size=size)
    without = statistics.median(found["bare group"]) + statistics.median(found["bare step"])
    found["over bare"] = [statistics.median(found["next"]) - without]
    return found


def cases(part: int) -> recovery.Cases:
    return {str(size): partial(one_size, size, max(3, 15 // part)) for size in SIZES}


if __name__ == "__main__":
    recovery.run(__doc__, 5, cases)
