"""A program that trains a small sharded model: every step's global batch is the same in every world."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.process.programs import Log, any_rank_finds, generation

WIDTH, LAYERS, BATCH = 31, 3, 60  # 31 rows are not the same number on each rank


def network() -> Any:
    import torch

    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)])


def step(model: Any, optimizer: Any, number: int, rank: int, size: int) -> None:
    """One step on this rank's part of the global batch `number`; the mean over ranks is the gradient of the whole."""
    import torch

    data = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    own = data[rank * BATCH // size : (rank + 1) * BATCH // size]
    ((model(own) - own).square().sum() * size / data.numel()).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(
    folder: str, *, every: int = 1, copies: int = 1, shard: int | None = None, pause: float = 0.01
) -> dict[str, Any]:
    """Train until `folder/finish` exists; return the step, and the largest difference to a training by one process.

    The rank whose number is in `folder/die-in-refill` dies in the middle of its next re-sharding.
    """
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    log, first = Log(folder), torch.get_rng_state()
    state = nbe.ShardedState(step=0, every=every, copies=copies)
    _die_in_refill(Path(folder) / "die-in-refill")

    @nbe.elastic
    def loop(state: Any) -> dict[str, Any]:
        with torch.device("meta"):
            model = network()
        mesh = nbe.device_mesh(shard=shard)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        state.bind(model=model, optimizer=optimizer)
        log(begin=state.step, generation=generation(), world=nbe.size(), rank=nbe.rank())
        while not any_rank_finds(folder, "finish"):
            step(model, optimizer, state.step, nbe.rank(), nbe.size())
            state.step += 1
            log(step=state.step, generation=generation(), world=nbe.size(), rank=nbe.rank())
            state.commit()
            time.sleep(pause)
        weights = [parameter.full_tensor() for parameter in model.parameters()]
        return {"step": state.step, "difference": difference(weights, state.step, first), "rank": nbe.rank()}

    result: dict[str, Any] = loop(state)
    return result


def difference(weights: list[Any], steps: int, random_state: Any) -> float:
    """The largest difference to the weights of an undisturbed training, relative to the largest weight."""
    import torch

    torch.set_rng_state(random_state)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(steps):
        step(model, optimizer, number, 0, 1)
    pairs = zip(weights, model.parameters(), strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def _die_in_refill(file: Path) -> None:
    from nbelastic.sharded import refill

    exchange = refill.exchange

    def dying(*args: Any) -> None:
        if file.exists() and file.read_text() == str(nbe.rank()):
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        exchange(*args)

    refill.exchange = dying
