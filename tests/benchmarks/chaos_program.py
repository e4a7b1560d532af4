"""The program that chaos trains: each step is the same in any world, and the state holds the proof.

The program fits noisy data in double precision with a fixed global batch. Ranks sum the same numbers in another order
than one process does, so losses agree except for rounding: see `TOLERANCE`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import time
from pathlib import Path
from typing import Any

import nbelastic as nbe

SAMPLES, BATCH = 1000, 30  # an epoch's last batch has 10: not the same for all ranks in most worlds
STEPS = -(-SAMPLES // BATCH)  # per epoch
SLEEP = 0.005
# Relative, of a step's loss. A sum of a few hundred doubles is off by about 1e-14; momentum and tens of thousands of steps
# add that up. One sample used twice, or left out, moves a loss by 1e-3.
TOLERANCE = 1e-9
LOSS, ENDING, LOST, USED = range(4)  # offsets in the tensor that the ranks reduce


def beginning() -> tuple[Any, Any, Any, Any]:
    """Return inputs, targets, a network and its optimizer; they are the same in each process."""
    import torch

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    generator = torch.Generator().manual_seed(11)
    inputs = normal(SAMPLES, 16)
    targets = (inputs @ normal(16, 1) / 4).tanh() + normal(SAMPLES, 1) / 2  # the noise keeps the losses from zero
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(normal(*parameter.shape) / 4)
    return inputs, targets, model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def mean_loss(model: Any, inputs: Any, targets: Any) -> Any:
    return (model(inputs) - targets).square().mean()


def train(folder: str, epochs: int | None = None) -> dict[str, Any]:
    """Train for `epochs`, or until an epoch ends after `folder/finish` was made; return values that all ranks share."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from nbelastic.worker import session

    inputs, targets, model, optimizer = beginning()
    state = nbe.TorchState(
        model=model,
        optimizer=optimizer,
        sampler=nbe.ElasticSampler(range(SAMPLES), seed=5, global_batch=BATCH),
        used=torch.zeros(SAMPLES, dtype=torch.float64),  # how often each sample was trained on
        curve="",  # each step's loss over the whole global batch, in hex: a list would be copied item by item at each commit
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
            state.sampler.set_epoch(state.epoch)
            loader = DataLoader(range(SAMPLES), batch_size=nbe.local_batch_size(BATCH), sampler=state.sampler)
            for indices in loader:
                weight = state.sampler.weight(len(indices))
                loss = mean_loss(ddp, inputs[indices], targets[indices]) * weight
                optimizer.zero_grad()
                loss.backward()
                shared = torch.zeros(USED + SAMPLES, dtype=torch.float64)
                shared[LOSS] = loss.detach() / nbe.size()
                shared[ENDING] = (Path(folder) / "finish").exists()
                shared[LOST] = lost
                if weight:  # a sample with weight 0 is a repeated one
                    shared[indices + USED] = 1
                dist.all_reduce(shared)  # before the step: no collective may come between the step and the commit
                optimizer.step()
                state.sampler.record_batch(len(indices))
                state.used += shared[USED:]
                state.curve += struct.pack("d", shared[LOSS].item()).hex()
                state.lost += int(shared[LOST].item())
                state.first_at = state.first_at or time.monotonic()
                if shared[ENDING].item() and state.last is None:
                    state.last = state.epoch
                lost, committed = 0, state.commits + 1
                time.sleep(SLEEP)
                bits = digest(model, optimizer)
                name = f"{session.world().generation}/{state.commits + 1}"
                state.commit()
                commits.write(f"{name} {bits}\n")
            odd = (state.used != state.epoch + 1).nonzero().flatten().tolist()
            assert not odd, f"in epoch {state.epoch} samples {odd[:5]} were not used exactly once"
            if state.epoch == state.last:
                return

    loop(state)
    return {
        "epochs": state.epoch + 1,
        "steps": state.commits,
        "lost": state.lost,
        "curve": state.curve,
        "used": set(state.used.tolist()),
        "parameters": digest(model, optimizer),
        "seconds": time.monotonic() - state.first_at,
    }


def digest(model: Any, optimizer: Any) -> str:
    """Hash every bit of the parameters and their momentum."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
        found.update(optimizer.state[parameter]["momentum_buffer"].numpy().tobytes())
    return found.hexdigest()


def alone(epochs: int) -> list[float]:
    """Return the losses of the same steps in one process, without ranks or weights."""
    inputs, targets, model, optimizer = beginning()
    losses = []
    for epoch in range(epochs):
        order = nbe.ElasticSampler(range(SAMPLES), seed=5)
        order.set_epoch(epoch)
        indices = list(order)
        for start in range(0, SAMPLES, BATCH):
            batch = indices[start : start + BATCH]
            loss = mean_loss(model, inputs[batch], targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
