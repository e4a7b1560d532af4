"""A plain script for torchrun: DDP, and a checkpoint that every start begins from. It knows nothing of nbelastic.

torchrun --nproc-per-node=2 04_torchrun_script.py FOLDER STEPS
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    folder, steps = sys.argv[1], int(sys.argv[2])
    checkpoint = os.path.join(folder, "checkpoint.pt")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ddp = DistributedDataParallel(model)

    while step < steps:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step * world + rank))
        loss = (ddp(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % 10 == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved, checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
        time.sleep(0.02)

    print(f"rank {rank} of {world} has made step {step}")
    del ddp, loss
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
