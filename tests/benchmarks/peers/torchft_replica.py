"""One torchft replica in its own process, as in its DDP example: `… torchft_replica FOLDER NUMBER LIGHTHOUSE [MIN]`.

The timeouts are those of the example: 5 s for gloo, 30 s for the manager.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from tests.benchmarks import programs
from tests.benchmarks.peers.nodes import store_on_loopback
from tests.benchmarks.peers.steplog import StepLog


def main() -> None:
    folder, number, lighthouse, *minimum = sys.argv[1:]
    store = store_on_loopback()
    model, inner = programs.model_and_optimizer()

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        inner.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=int(minimum[0]) if minimum else 1,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{number}",
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    log = StepLog(folder)
    while True:
        before = manager.current_step()
        one_step(ddp, optimizer)
        if manager.is_participating() and manager.current_step() > before:  # the step was committed
            rank, world = manager.participating_rank(), manager.num_participants()
            log.write(step=manager.current_step(), rank=rank, world=world)
        time.sleep(programs.SLEEP)


def one_step(ddp: Any, optimizer: Any) -> None:
    """Do one step like `programs.one_step`, but begin with zero_grad: there torchft begins to ask for its quorum."""
    optimizer.zero_grad()
    x = torch.randn(32, programs.SIZE[0])
    (ddp(x) - x).pow(2).mean().backward()
    optimizer.step()


if __name__ == "__main__":
    main()
