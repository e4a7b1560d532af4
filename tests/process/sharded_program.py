"""A small sharded training whose numbers depend on the step alone, not on the number of ranks."""

from __future__ import annotations

import time
from typing import Any

import nbelastic as nbe
from tests.process import programs

WIDTH, BATCH = 12, 12


def make(shared: bool = True) -> Any:
    """The model on the present device; its first and last layers share their weight."""
    import torch

    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH, bias=False)
    )
    if shared:
        model[2].weight = model[0].weight
    return model


def whole(values: dict[str, Any]) -> dict[str, Any]:
    """Collective: whole tensors as lists, by name."""
    from torch.distributed.tensor import DTensor

    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().tolist() for name, one in values.items()
    }


def values_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Collective: parameters, what the optimizer keeps for them, and the learning rate."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    own, kept = get_state_dict(model, optimizer)
    entries = {f"{name}.{entry}": value for name, one in kept["state"].items() for entry, value in one.items()}
    return {**whole(own), **whole(entries), "lr": [group["lr"] for group in kept["param_groups"]]}


def train(
    folder: str,
    *,
    steps: int = 0,
    pause: float = 0.0,
    every: int = 1,
    copies: int = 1,
    load: str | None = None,
    load_inside: bool = False,
    save: dict[int, str] | None = None,
) -> dict[str, Any]:
    """Train until `folder/finish` exists, or for `steps` steps. `save`: after which step, and where."""
    import torch
    from torch.distributed.fsdp import fully_shard

    log = programs.Log(folder)
    torch.manual_seed(3)
    state = nbe.ShardedState(step=0, every=every, copies=copies)
    if load is not None and not load_inside:
        state.load(load)

    @nbe.elastic
    def loop(state: Any) -> dict[str, Any]:
        with torch.device("meta"):
            model = make()
        fully_shard(model, mesh=nbe.device_mesh())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if load is not None and load_inside:
            state.load(load)
        state.bind(model=model, optimizer=optimizer)
        log(begin=state.step, commits=state.commits, generation=programs.generation(), rank=nbe.rank())
        while not (state.step >= steps if steps else programs.any_rank_finds(folder, "finish")):
            batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(state.step))
            size, rank = nbe.size(), nbe.rank()
            mine = batch[rank * BATCH // size : (rank + 1) * BATCH // size]
            loss = (model(mine) - mine).pow(2).sum() * size / batch.numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            log(step=state.step, generation=programs.generation(), rank=nbe.rank())
            state.commit()
            if save is not None and state.step in save:
                state.save(save[state.step]).wait(20)
            time.sleep(pause)
        return {"step": state.step, "commits": state.commits, "values": values_of(model, optimizer)}

    return dict(loop(state))


def plain_program(folder: str, path: str, size: int) -> dict[str, Any]:
    """Torch alone, in one of `size` processes: load the checkpoint `path`, write it again to `folder/plain`.

    Returns all values.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=store.add("ranks", 1) - 1, world_size=size)
    torch.manual_seed(11)
    model = make()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    own, kept = get_state_dict(model, optimizer)
    state = {"model": own, "optimizer": kept}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    own, kept = get_state_dict(model, optimizer)
    dcp.save({"model": own, "optimizer": kept}, checkpoint_id=f"{folder}/plain")
    found = values_of(model, optimizer)
    dist.destroy_process_group()
    return found
