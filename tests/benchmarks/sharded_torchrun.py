"""What a user of torchrun writes: FSDP2, with a DCP checkpoint every 20 steps, from which each start continues.

torchrun starts it: `-m tests.benchmarks.sharded_torchrun FOLDER`. `FOLDER/checkpoints` keeps the checkpoints.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from tests.benchmarks.sharded_programs import Marks, one_step, sharded

EVERY = 20  # steps between two checkpoints


def newest(folder: Path) -> int:
    """The step of the newest whole checkpoint, or 0: DCP writes `.metadata` last."""
    return max((int(one.parent.name) for one in folder.glob("*/.metadata")), default=0)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    values = get_state_dict(model, optimizer)
    return {"model": values[0], "optimizer": values[1]}


def main() -> None:
    folder = Path(sys.argv[1])
    checkpoints = folder / "checkpoints"
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = sharded(init_device_mesh("cpu", (world,)))
    model.to_empty(device="cpu")
    for layer in model:
        torch.nn.init.normal_(layer.weight.to_local(), std=0.02)
    step = newest(checkpoints)
    if step:
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=checkpoints / str(step))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    marks = Marks(str(folder))
    while True:
        one_step(model, optimizer)
        step += 1
        marks.write("step", step=step, rank=rank, world=world)
        if step % EVERY == 0:
            dcp.save(state_of(model, optimizer), checkpoint_id=checkpoints / str(step))
            if rank == 0:
                shutil.rmtree(checkpoints / str(step - EVERY), ignore_errors=True)


if __name__ == "__main__":
    main()
