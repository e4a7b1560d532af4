"""torchft's HSDP: two replicas of two FSDP2 ranks; `PYTHON -m tests.benchmarks.sharded_torchft FOLDER`, until SIGTERM.

Each replica is a torchrun of two workers, which restarts both when one dies; torchft reduces the gradients between the
replicas, and a replica that comes back fetches the state of the other one. The timeouts are those of torchft's examples.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from tests.benchmarks.sharded_programs import BATCH, WIDTH, Marks, sharded

REPLICAS, SHARDS = 2, 2


def launch(folder: str) -> None:
    """Start the lighthouse and the replicas, and wait."""
    from torchft.coordination import LighthouseServer

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(SHARDS), "--max-restarts", "100", "--monitor-interval", "0.1"),
        *("-m", "tests.benchmarks.sharded_torchft", folder, address),
    ]
    running = [subprocess.Popen([*command, str(number)]) for number in range(REPLICAS)]
    try:
        for process in running:
            process.wait()
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        lighthouse.shutdown()


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """The local tensors: both replicas are sharded in the same way, so rank receives from rank."""
    return {
        str(number): {
            "parameter": parameter.to_local().detach(),
            **{k: getattr(v, "_local_tensor", v) for k, v in optimizer.state[parameter].items()},
        }
        for number, parameter in enumerate(model.parameters())
    }


def train(folder: str, lighthouse: str, number: str) -> None:
    from torchft import Manager, ProcessGroupGloo

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = sharded(init_device_mesh("cpu", (SHARDS,)))
    model.to_empty(device="cpu")
    for layer in model:
        torch.nn.init.normal_(layer.weight.to_local(), std=0.02)
    for parameter in model.parameters():  # the optimizer's tensors must exist before they are loaded
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    def load(saved: dict[str, Any]) -> None:
        with torch.no_grad():
            for key, own in state_of(model, optimizer).items():
                for name, tensor in own.items():
                    tensor.copy_(saved[key][name])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: state_of(model, optimizer),
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        hostname="localhost",
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{number}",
    )

    def reduce(gradient: torch.Tensor) -> None:
        manager.allreduce(gradient).wait()

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(reduce)
    marks = Marks(folder)
    while True:
        before = manager.current_step()
        manager.start_quorum()
        optimizer.zero_grad()
        model(torch.randn(BATCH, WIDTH)).pow(2).mean().backward()
        if manager.should_commit():
            optimizer.step()
        replica = manager.participating_rank()
        if replica is not None and manager.current_step() > before:
            world = manager.num_participants() * SHARDS
            marks.write("step", step=manager.current_step(), rank=replica * SHARDS + rank, world=world)


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    launch(sys.argv[1]) if len(sys.argv) == 2 else train(*sys.argv[1:])
