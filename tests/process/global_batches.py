"""A program whose steps have the same losses in any world: weighted global batches in double precision."""

from __future__ import annotations

import itertools
import time
from typing import Any

import nbelastic as nbe
from tests.process.programs import PAUSE, Log, any_rank_finds, generation

SAMPLES, BATCH = 102, 10  # each epoch ends with a batch of 2: fewer than there are ranks


def data_and_model() -> tuple[Any, Any, Any, Any]:
    """The data, a network and its optimizer, equal in every process."""
    import torch

    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    targets = torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return inputs, targets, model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def mean_loss(model: Any, inputs: Any, targets: Any) -> Any:
    return (model(inputs) - targets).square().mean()


def train(folder: str) -> int:
    """Log each step's loss over the whole global batch, until `folder/finish` exists; return the number of steps."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    log = Log(folder)
    inputs, targets, model, optimizer = data_and_model()
    sampler = nbe.ElasticSampler(range(SAMPLES), seed=3, global_batch=BATCH)
    state = nbe.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)

    @nbe.elastic
    def loop(state: Any) -> int:
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        for state.epoch in itertools.count(state.epoch):
            sampler.set_epoch(state.epoch)
            for indices in DataLoader(range(SAMPLES), batch_size=nbe.local_batch_size(BATCH), sampler=sampler):
                if any_rank_finds(folder, "finish"):
                    return int(state.step)
                loss = mean_loss(ddp, inputs[indices], targets[indices]) * sampler.weight(len(indices))
                optimizer.zero_grad()
                loss.backward()
                summed_loss = loss.detach().clone()
                dist.all_reduce(summed_loss)
                optimizer.step()
                sampler.record_batch(len(indices))
                state.step += 1
                log(step=state.step, generation=generation(), world=nbe.size(), loss=summed_loss.item() / nbe.size())
                state.commit()
                time.sleep(PAUSE)
        raise AssertionError

    return int(loop(state))


def losses_in_one_process(steps: int) -> list[float]:
    """The losses of the same steps in one process, which splits no batch and weights no loss."""
    inputs, targets, model, optimizer = data_and_model()
    losses: list[float] = []
    for number in itertools.count():
        order = nbe.ElasticSampler(range(SAMPLES), seed=3)
        order.set_epoch(number)
        indices = list(order)
        for start in range(0, SAMPLES, BATCH):
            if len(losses) == steps:
                return losses
            batch = indices[start : start + BATCH]
            loss = mean_loss(model, inputs[batch], targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    raise AssertionError
