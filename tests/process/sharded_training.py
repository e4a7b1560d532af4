"""A program that trains a small sharded model: every step's global batch is the same in every world."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.process.programs import Log, any_rank_finds, generation

RATE = 0.01
WIDTH, LAYERS = 31, 3  # 31 rows are not the same number on each rank
EPSILON = 1e-3  # AdamW's own, 1e-8, lets rounding errors grow to 0.1 % in 3,000 steps, once the loss is small
SAMPLES, BATCH = 230, 60  # each epoch ends with a smaller batch


def network(layers: int = LAYERS) -> Any:
    import torch

    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(layers)])


def samples() -> Any:
    import torch

    return torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def step(model: Any, optimizer: Any, batch: Any, weight: float = 1.0) -> None:
    ((model(batch) - batch).square().mean() * weight).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(
    folder: str,
    *,
    every: int = 1,
    copies: int = 1,
    shard: int | None = None,
    pause: float = 0.06,
    lr: float = RATE,
    layers: int = LAYERS,
    fails: bool = False,
) -> dict[str, Any]:
    """Train until `folder/finish` exists; return the step and the weights.

    The rank whose number is in `folder/die-in-refill` dies in the middle of its next re-sharding. The rank whose number
    is in `folder/hang` hangs in its next step. While there is a file `folder/wait`, no rank makes its next first step. With
    `fails`, rank 1 spoils the weights before that, and raises.
    """
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader

    torch.manual_seed(3)
    log, data = Log(folder), samples()
    sampler = nbe.ElasticSampler(range(SAMPLES), seed=3, global_batch=BATCH)
    state = nbe.ShardedState(step=0, epoch=0, sampler=sampler, every=every, copies=copies)
    _die_in_refill(Path(folder) / "die-in-refill")

    @nbe.elastic
    def loop(state: Any) -> dict[str, Any]:
        with torch.device("meta"):
            model = network(layers)
        mesh = nbe.device_mesh(shard=shard)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=EPSILON)
        state.bind(model=model, optimizer=optimizer)
        log(begin=state.step, generation=generation(), world=nbe.size(), rank=nbe.rank(), lr=lr)
        while (Path(folder) / "wait").exists():
            time.sleep(0.01)
        if fails and nbe.rank() == 1:
            with torch.no_grad():
                model[0].weight.zero_()
            raise ValueError("no batch")
        for state.epoch in itertools.count(state.epoch):
            sampler.set_epoch(state.epoch)
            for indices in DataLoader(range(SAMPLES), batch_size=nbe.local_batch_size(BATCH), sampler=sampler):
                if any_rank_finds(folder, "finish"):
                    return result(model)
                _hang(Path(folder) / "hang")
                step(model, optimizer, data[indices], sampler.weight(len(indices)))
                sampler.record_batch(len(indices))
                state.step += 1
                log(step=state.step, generation=generation(), world=nbe.size(), rank=nbe.rank(), lr=lr)
                state.commit()
                time.sleep(pause)
        raise AssertionError

    def result(model: Any) -> dict[str, Any]:
        weights = [parameter.full_tensor().detach() for parameter in model.parameters()]
        return {"step": state.step, "weights": weights}

    return dict(loop(state))


def rates_in(lines: list[dict[str, Any]]) -> list[float]:
    """The learning rate of each step, from the lines that the processes have logged: the last line of a step counts."""
    found = {line["step"]: line["lr"] for line in lines}
    return [found[step] for step in sorted(found)]


def difference(results: list[dict[str, Any]], rates: list[float] | None = None) -> float:
    """The largest difference of any weights to those after as many steps of one process, relative to the largest weight.

    `rates`: the learning rate of each step, as far as it is not always the same. Layers that were added are left out.
    """
    import torch

    torch.manual_seed(3)
    model, data = network(), samples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON)
    (steps,) = {result["step"] for result in results}
    for indices, lr in zip(itertools.islice(_batches(), steps), rates or itertools.repeat(RATE), strict=False):
        optimizer.param_groups[0]["lr"] = lr
        step(model, optimizer, data[indices])
    wanted = [p.detach() for p in model.parameters()]
    pairs = (pair for result in results for pair in zip(result["weights"], wanted, strict=False))
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def _batches() -> Iterator[list[int]]:
    """The global batches: every sample once per epoch."""
    for epoch in itertools.count():
        order = nbe.ElasticSampler(range(SAMPLES), seed=3)
        order.set_epoch(epoch)
        indices = list(order)
        yield from (indices[start : start + BATCH] for start in range(0, SAMPLES, BATCH))


def _die_in_refill(file: Path) -> None:
    from nbelastic.sharded import refill

    exchange = refill.exchange

    def dying(*args: Any) -> None:
        with contextlib.suppress(FileNotFoundError):  # also if another rank removes it just now
            if file.read_text() == str(nbe.rank()):
                file.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        exchange(*args)

    refill.exchange = dying


def _hang(file: Path) -> None:
    """As gloo leaves about one rank in a hundred: no abort wakes it."""
    with contextlib.suppress(FileNotFoundError):
        if file.read_text() == str(nbe.rank()):
            file.unlink()
            exec(compile("__import__('time').sleep(1000)", "/site-packages/torch/distributed/dead.py", "exec"))
