"""The program that chaos trains with `--stream`: uneven shards of a stream, of which each sample is used once per epoch.

The ranks add up which samples they have used, with weights, in a tensor that is part of the state. At the end of each
epoch every sample must be there once. A `StepLog` writes each step to files, where at the end each step must be once.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.benchmarks.chaos_program import SLEEP, digest

LENGTHS = [i * 37 % 90 for i in range(24)]  # from 0 to 88
STARTS = [sum(LENGTHS[:shard]) for shard in range(len(LENGTHS))]
SAMPLES, BATCH = sum(LENGTHS), 8
ENDING, LOST, WEIGHTS, USED = range(4)  # offsets in the tensor that the ranks reduce


def open_shard(shard: int) -> Iterator[int]:
    """The numbers of the shard's samples, one by one."""
    yield from range(STARTS[shard], STARTS[shard] + LENGTHS[shard])


class Lines:
    """A file of steps. What earlier files have from its first step on does not count."""

    opened = False  # in this process: it is rank 0, or was until it was removed

    def __init__(self, folder: str, first_step: int) -> None:
        Lines.opened = True
        self._file = (Path(folder) / f"{time.time_ns()}.steps").open("w")  # its buffer is lost in a kill
        self._file.write(f"{first_step}\n")

    def write(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps([step, values]) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def logged(folder: str) -> list[tuple[int, float]]:
    """The steps in the files, with the number of samples that were used until each."""
    found: list[Any] = []
    for file in sorted(Path(folder).glob("*.steps")):
        first, *lines = file.read_text().splitlines() or ["0"]
        found = [one for one in found if not lines or one[0] < int(first)] + list(map(json.loads, lines))
    return [(step, values["used"]) for step, values in found]


def train(folder: str, epochs: int | None = None, *, processes: int = 0) -> dict[str, Any]:
    """Train for `epochs`, or until an epoch ends after `folder/finish` was made; return values that all ranks share.

    `processes` of a DataLoader read in each rank.
    """
    import torch
    import torch.distributed as dist

    from nbelastic.worker import session

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = nbe.TorchState(
        model=model,
        optimizer=optimizer,
        stream=nbe.ElasticStream(range(len(LENGTHS)), open_shard, shuffle=True),
        log=nbe.StepLog(lambda first_step: Lines(folder, first_step)),
        used=torch.zeros(SAMPLES, dtype=torch.float64),  # how often each sample was trained on
        lost=0,  # committed steps that were made again
        epoch=0,
        last=epochs - 1 if epochs else None,  # the last epoch
        first_at=0.0,
    )
    committed = 0  # by this process
    commits = (Path(folder) / f"{os.getpid()}.commits").open("a", buffering=1)

    @nbe.elastic
    def loop(state: Any) -> None:
        nonlocal committed
        lost, committed = max(0, committed - state.commits), state.commits
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        for state.epoch in itertools.count(state.epoch):
            state.stream.set_epoch(state.epoch)
            for samples in state.stream.loader(BATCH, num_workers=processes):
                weight = state.stream.weight()
                loss = (ddp(samples[:, None].double() / SAMPLES) - 1).square().mean() * weight
                optimizer.zero_grad()
                loss.backward()
                shared = torch.zeros(USED + SAMPLES, dtype=torch.float64)
                shared[ENDING] = (Path(folder) / "finish").exists()
                shared[LOST] = lost
                shared[WEIGHTS] = weight / nbe.size()
                if weight:  # a batch with weight 0 is a repeated one
                    shared[samples + USED] = 1
                dist.all_reduce(shared)  # before the step: no collective may come between the step and the commit
                assert abs(shared[WEIGHTS].item() - 1) < 1e-9, f"the weights add up to {shared[WEIGHTS].item()}"
                optimizer.step()
                state.stream.record_batch()
                state.used += shared[USED:]
                state.log(used=state.used.sum().item())
                state.lost += int(shared[LOST].item())
                state.first_at = state.first_at or time.monotonic()
                if shared[ENDING].item() and state.last is None:
                    state.last = state.epoch
                lost, committed = 0, state.commits + 1
                time.sleep(SLEEP)
                name = f"{session.world().generation}/{state.commits + 1}"
                state.commit()
                commits.write(f"{name} {digest(model, optimizer)}\n")
            odd = (state.used != state.epoch + 1).nonzero().flatten().tolist()
            assert not odd, f"in epoch {state.epoch} samples {odd[:5]} were not used exactly once"
            if state.epoch == state.last:
                return

    loop(state)
    if Lines.opened:
        rows = logged(folder)
        assert [step for step, _ in rows] == [*range(1, state.commits + 1)], "steps are missing in the log, or double"
        assert all(a < b for (_, a), (_, b) in itertools.pairwise(rows)), "the log has a step that was made again"
    return {
        "epochs": state.epoch + 1,
        "steps": state.commits,
        "lost": state.lost,
        "used": set(state.used.tolist()),
        "parameters": digest(model, optimizer),
        "seconds": time.monotonic() - state.first_at,
    }
