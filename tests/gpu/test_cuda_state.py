"""State and membership with CUDA tensors: run with `pytest -m gpu` on a machine that has a GPU."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

import nbelastic as nbe

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),
]


def _train(folder: str, steps_a_commit: int) -> tuple[int, float, str]:
    """Until `folder/finish` exists; step, sum of the weights and device of each rank."""
    from pathlib import Path

    import torch.distributed as dist

    device = nbe.device()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout()).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)

    @nbe.elastic
    def loop(state: Any) -> tuple[int, float, str]:
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        while True:
            over = torch.tensor([float((Path(folder) / "finish").exists())])
            dist.all_reduce(over, dist.ReduceOp.MAX)
            if over.item():
                break
            for _ in range(steps_a_commit):
                loss = ddp(torch.randn(16, 64, device=device)).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state.step += 1
            state.commit()
        return state.step, sum(p.detach().double().sum().item() for p in model.parameters()), str(device)

    return loop(state)


def _ranked(cluster: nbe.Cluster) -> list[Any]:
    return sorted((w for w in cluster.workers if w.rank is not None), key=lambda w: w.rank)


@pytest.mark.parametrize("steps_a_commit", [1, 3])
def test_workers_that_share_a_gpu_survive_everything(tmp_path, steps_a_commit):
    """Over gloo with CUDA tensors: killed, stopped, joined, removed; all ranks end with the same weights."""
    with nbe.Cluster("localhost:3", min=1, max=4, backend="gloo", cooldown=(0, 0)) as cluster:
        job = cluster.run(_train, str(tmp_path), steps_a_commit)
        for sig in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            cluster.wait(3, timeout=60)
            time.sleep(1)
            os.kill(_ranked(cluster)[-1].pid, sig)
            cluster.wait(2, timeout=60)
        cluster.wait(3, timeout=60)
        cluster.add_host("127.0.0.2:1")
        cluster.wait(4, timeout=60)
        cluster.remove_host("127.0.0.2")
        cluster.wait(3, timeout=60)
        (tmp_path / "finish").touch()
        results = job.result(timeout=60)
    assert len({(step, weights) for step, weights, _ in results}) == 1
    assert {device for _, _, device in results} == {"cuda:0"}


def test_nccl_is_formed_a_hundred_times_by_planned_changes_of_one(tmp_path):
    """A world of one on NCCL, left and formed again: memory on the GPU stays flat after the first ten."""
    with nbe.Cluster("localhost:1", min=1) as cluster:
        used = [cluster.run(_memory_after_training).result(timeout=120)[0] for _ in range(100)]
    assert max(used[90:]) <= max(used[5:15]) * 1.02


def _memory_after_training() -> int:
    device = nbe.device()
    model = torch.nn.Linear(256, 256).to(device)
    state = nbe.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    @nbe.elastic
    def loop(state: Any) -> None:
        ddp = torch.nn.parallel.DistributedDataParallel(state.model, device_ids=[device.index])
        for _ in range(2):
            ddp(torch.randn(8, 256, device=device)).sum().backward()
            state.optimizer.step()
            state.commit()

    loop(state)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def test_copies_lie_in_pinned_memory_and_come_back():
    """Several steps a commit: the second copy of a large tensor is pinned, and all are restored bit by bit."""
    model = torch.nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)
    for _ in range(2):
        for _ in range(3):
            model(torch.randn(8, 512, device="cuda")).sum().backward()
            optimizer.step()
        state.commit()
    before = [p.detach().clone() for p in model.parameters()]
    kept = state._tensors._copies.values()
    assert all(one.copy.is_pinned() or one.live.nbytes < 1 << 20 for one in kept)
    for _ in range(2):
        model(torch.randn(8, 512, device="cuda")).sum().backward()
        optimizer.step()
    state.restore()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_checkpoints_of_cuda_tensors(tmp_path):
    """They are loaded where the model is."""
    model = torch.nn.Linear(64, 64).cuda()
    state = nbe.TorchState(model=model, step=3)
    state.save(tmp_path).wait(timeout=60)
    other = nbe.TorchState(model=torch.nn.Linear(64, 64).cuda(), step=0)
    other.load(tmp_path)
    assert other.step == 3
    assert torch.equal(other.model.weight, model.weight)
