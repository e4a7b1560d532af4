"""Trainings that frameworks shard with FSDP2 and whose ranks kill themselves, and the same ones in one process.

All are in double precision, so that the results of worlds of different sizes are equal to nine digits.
"""

from __future__ import annotations

import time
from typing import Any

import nbelastic as nbe
from tests.process.framework_programs import die_once
from tests.process.programs import Log, generation

SAMPLES, BATCH, EPOCHS = 100, 12, 3  # each epoch ends with a batch of 4
ACCUMULATED = 2
Places = dict[str, int]  # where the last rank kills itself, and after how many steps


def network() -> Any:
    """Equal in every process. 7 rows are not the same number on each rank."""
    import torch

    layers = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layers


def optimizer_and_schedule(parameters: Any) -> tuple[Any, Any]:
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=0.02)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)


def data() -> Any:
    import torch

    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return torch.utils.data.TensorDataset(torch.arange(SAMPLES), inputs, inputs.prod(1, keepdim=True))


def mean_loss(layers: Any, batch: Any) -> Any:
    _, inputs, targets = batch
    return (layers(inputs) - targets).square().mean()


def weights(layers: Any) -> list[float]:
    """Collective: of the whole model."""
    found = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in layers.parameters()]
    return [x for one in found for x in one.flatten().tolist()]


def train_in_one_process() -> dict[str, Any]:
    """With plain PyTorch, which shards no model and splits no batch."""
    layers, samples = network(), data()
    optimizer, schedule = optimizer_and_schedule(layers.parameters())
    order, steps = nbe.ElasticSampler(range(SAMPLES)), 0
    for epoch in range(EPOCHS):
        order.set_epoch(epoch)
        numbers = list(order)
        batches = [numbers[i : i + BATCH] for i in range(0, SAMPLES, BATCH)]
        for index, batch in enumerate(batches, 1):
            (mean_loss(layers, samples[batch]) / ACCUMULATED).backward()
            if index % ACCUMULATED == 0 or index == len(batches):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                steps += 1
    return {"weights": weights(layers), "lr": schedule.get_last_lr(), "steps": steps}


def train_with_accelerate(folder: str, places: Places, *, made_once: bool = False) -> dict[str, Any]:
    """An ordinary loop, which accumulates gradients over two batches, and commits after each of them.

    `made_once`: outside of the elastic function. Otherwise the model has the values of rank 0 in the first world, and is made
    on the meta device in later ones.
    """
    import torch
    from accelerate import FullyShardedDataParallelPlugin

    from nbelastic.integrations.accelerate import Accelerator

    log, samples = Log(folder), data()
    state = nbe.ShardedState(sampler=nbe.ElasticSampler(samples, global_batch=BATCH), epoch=0, step=0)

    once = make(0, 0)

    @nbe.elastic
    def loop(state: Any) -> dict[str, Any]:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10, cpu_ram_efficient_loading=True
        )
        accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED, fsdp_plugin=plugin)
        model, optimizer, schedule = once if made_once else make(state.step, nbe.rank())
        loader = torch.utils.data.DataLoader(samples, batch_size=BATCH, sampler=state.sampler)
        model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        log(begin=state.step, generation=generation(), world=nbe.size())
        for state.epoch in range(state.epoch, EPOCHS):
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = mean_loss(model, batch)
                    die(folder, places, "before a backward pass", state.step)
                    accelerator.backward(loss)
                    die(folder, places, "before a step", state.step)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    state.step += 1
                    log(step=state.step, generation=generation(), world=nbe.size())
                state.commit()
                where = "after a commit" if accelerator.sync_gradients else "in an accumulation"
                die(folder, places, where, state.step)
                while made_once and state.step == 8 and accelerator.sync_gradients and nbe.size() < 3:
                    time.sleep(0.05)  # until there is a newcomer, whose model has values
                    state.commit()
        return {"weights": weights(model), "lr": schedule.get_last_lr(), "steps": state.step}

    return dict(loop(state))


def make(step: int, rank: int) -> tuple[Any, Any, Any]:
    import torch

    model = network()
    if step:
        model.to("meta")
    elif rank:
        torch.nn.init.zeros_(model[0].weight)
    return model, *optimizer_and_schedule(model.parameters())


def die(folder: str, places: Places, where: str, step: int) -> None:
    if places.get(where) == step:
        die_once(folder, where)
