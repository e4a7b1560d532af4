"""A plain DDP script for torchrun, with a checkpoint after every step: `train.py FOLDER STEPS [PAUSE]`.

The data of a step are the same in a world of any size. The script ends once FOLDER/finish exists. It sleeps PAUSE seconds
(0.05) after each step, since other processes need the processors too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

BATCH = 12


def main() -> None:
    folder, steps, pause = Path(sys.argv[1]), int(sys.argv[2]), float([*sys.argv, "0.05"][3])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint, step = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    loss = torch.zeros(())
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    with open(folder / f"{os.getpid()}.jsonl", "a", buffering=1) as log:
        while step < steps:
            x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))[rank::world]
            loss = ddp(x).pow(2).sum() * world / BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            line = {"t": time.time(), "step": step, "rank": rank, "world": world, "pid": os.getpid()}
            log.write(json.dumps({**line, "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}) + "\n")
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, partial := folder / "partial.pt")
                os.replace(partial, checkpoint)
            ending = torch.tensor([float((folder / "finish").exists())])
            dist.all_reduce(ending)
            if ending.item():
                break
            time.sleep(pause)
    if rank == 0:
        print(f"done at {step}")
    del ddp, loss  # a reducer that holds the group's last reference can hang in torch, with the GIL held
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a normal exit aborts in one of some dozens of runs: one of torch's threads is still joinable


if __name__ == "__main__":
    main()
