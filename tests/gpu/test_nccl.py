"""The choice of NCCL, and its last collectives in a world: run with `pytest -m gpu` on a machine that has a GPU.

`python -m tests.gpu` shows the rest.
"""

from __future__ import annotations

import pytest

import nbelastic as nbe

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),
]


def _step(backend: str, steps: int) -> tuple[int, str, float]:
    import torch.distributed as dist

    device = nbe.device()
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256).to(device)
    state = nbe.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), step=0)

    @nbe.elastic
    def train(state):
        found = dist.get_backend(dist.group.WORLD)
        if backend not in found:
            raise ValueError(f"{found} is not {backend}")
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        while state.step < steps:
            x = torch.randn(32, 256, device=device)
            state.optimizer.zero_grad()
            (ddp(x) - x).pow(2).mean().backward()
            state.optimizer.step()
            state.step += 1
            state.commit()
        return state.step, str(device), float(model.weight.detach().double().sum())

    return train(state)


def test_two_workers_share_a_gpu_over_gloo():
    """With fewer GPUs than slots it is gloo, with CUDA tensors; both ranks end with the same weights."""
    if torch.cuda.device_count() > 1:
        pytest.skip("this is about sharing one GPU")
    with nbe.Cluster("localhost:2", min=2) as cluster:
        results = cluster.run(_step, "gloo", 20).result(timeout=120)
    assert len({weights for _, _, weights in results}) == 1
    assert {device for _, device, _ in results} == {"cuda:0"}


def _sums(worlds: int) -> list[tuple[float, float, int]]:
    """Sum the ranks' numbers again and again, behind larger sums, and commit without a step; what was wrong in the next world."""
    import torch.distributed as dist

    state = nbe.ObjectState(worlds=0, sums=torch.zeros(1 << 20, device=nbe.device()), expected=0, wrong=[])

    @nbe.elastic
    def loop(state):
        low, high = (float(value) for value in state.sums.aminmax())
        if not low == high == state.expected:
            state.wrong = [*state.wrong, (low, high, state.expected)]
        state.worlds += 1
        large = torch.ones(1 << 28, device=nbe.device())
        while state.worlds < worlds:
            for _ in range(8):
                dist.all_reduce(large, dist.ReduceOp.AVG)
            state.sums.fill_(nbe.rank() + 1)
            dist.all_reduce(state.sums)
            state.expected = nbe.size() * (nbe.size() + 1) // 2
            state.commit()
        return state.wrong

    return loop(state)


def test_collectives_that_are_under_way_when_ranks_leave_are_not_cut_off():
    """Two ranks on two GPUs, planned changes at commits without a step: what was summed before each commit is complete."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with nbe.Cluster("localhost:2", min=1, cooldown=(0, 0)) as cluster:
        job = cluster.run(_sums, 6)
        for most in (1, 2, 1, 2, 1):
            cluster.wait(3 - most, timeout=60)
            cluster.scale(max=most)
        assert job.result(timeout=120) == [[]]
