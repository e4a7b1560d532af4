"""What a user of torchrun writes: DDP, with a checkpoint every 20 steps, from which each start continues.

torchrun starts it: `-m tests.benchmarks.peers.plain_ddp FOLDER`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.benchmarks import programs
from tests.benchmarks.peers.steplog import StepLog

EVERY = 20  # steps between two checkpoints


def main() -> None:
    folder = sys.argv[1]
    checkpoint = Path(folder) / "checkpoint.pt"
    dist.init_process_group("gloo")
    model, optimizer = programs.model_and_optimizer()
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    log, rank, world = StepLog(folder), dist.get_rank(), dist.get_world_size()
    while True:
        programs.one_step(ddp, optimizer)
        step += 1
        log.write(step=step, rank=rank, world=world)
        if rank == 0 and step % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, partial := checkpoint.with_suffix(".partial"))
            os.replace(partial, checkpoint)  # a kill during a save keeps the checkpoint before
        time.sleep(programs.SLEEP)


if __name__ == "__main__":
    main()
