"""Whether an abort wakes each rank from gloo: `python -m tests.benchmarks.aborts [--json FILE] [--quick] [--only 4kB …]`.

Four processes all-reduce two tensors at a time, and abort their groups within 5 ms of one another, as survivors do after a
loss. The cases are the sizes of the tensors.

- `woken`: from a rank's own abort until its collective raises.
- `hung`: 1 for each rank whose collective has not raised within `PATIENCE` seconds, else 0. Such a worker is replaced.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.benchmarks import recovery
from tests.benchmarks.bare import processes

SIZE = 4
PATIENCE = 1.5
SPREAD = 0.005  # seconds within which all ranks abort
TENSORS = {"4kB": 1_000, "200kB": 50_000, "4MB": 1_000_000}  # their elements, of 4 bytes


class Aborting:
    """Each round forms a group, all-reduces in a thread, and aborts."""

    def __init__(self, elements: int, rank: int) -> None:
        from nbelastic.worker.next_generation import NextGeneration

        self._elements, self._rank, self._generation = elements, rank, 0
        self._next = NextGeneration("127.0.0.1")
        self._random = random.Random(rank)

    def round(self, store: Any, ready: Callable[[], object]) -> list[tuple[str, float]]:
        from nbelastic.worker.formation import Formation
        from nbelastic.worker.process_group import Group, Offer

        self._generation += 1
        offer = Offer("127.0.0.1")
        if self._rank == 0:
            store.set("offer", offer.endpoint)
        group = Group(self._generation)
        at = store.get("offer").decode()
        rank = self._rank
        group.form(
            Formation(self._generation, rank, SIZE, rank, SIZE, 0, 1, at, 0, (), (("a", SIZE),)), offer, self._next.run
        )
        raised = threading.Event()
        threading.Thread(target=self._reduce, args=(raised,), daemon=True).start()
        time.sleep(0.03)
        ready()
        time.sleep(self._random.random() * SPREAD)
        began = time.monotonic()
        while not raised.is_set() and time.monotonic() < began + PATIENCE:
            group.abort()
            raised.wait(0.001)
        took = time.monotonic() - began
        ready()  # all have raised, or never will
        if raised.is_set():
            group.leave()
        else:
            group.abandon()
            _forget()
        return [("woken", took), ("hung", float(not raised.is_set()))]

    def _reduce(self, raised: threading.Event) -> None:
        import torch
        import torch.distributed as dist

        tensors = [torch.ones(self._elements) for _ in range(2)]
        try:
            while True:
                for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                    work.wait()
        except RuntimeError:
            raised.set()


def _forget() -> None:
    """A rank that hangs cannot leave its group: make torch forget it, as a new process would."""
    import torch.distributed as dist

    from nbelastic.worker import process_group

    process_group._kept.append([*dist.distributed_c10d._world.pg_map])
    process_group._forget_groups()
    dist.distributed_c10d.ProcessGroupGloo = process_group.GLOO


def one_size(elements: int, rounds: int) -> dict[str, list[float]]:
    """Return the times and the hung ranks of all rounds."""
    with processes(partial(Aborting, elements), SIZE) as one_round:
        marks = [rank for _ in range(rounds) for rank in one_round()]
    hung = [rank["hung"] for rank in marks]
    print(f"{sum(hung):.0f} of {len(hung)} ranks hung")
    return {"woken": [rank["woken"] for rank in marks if not rank["hung"]], "hung": hung}


def cases(part: int) -> recovery.Cases:
    return {name: partial(one_size, elements, 100 // part) for name, elements in TENSORS.items()}


if __name__ == "__main__":
    recovery.run(__doc__, 5, cases)
