"""The state with CUDA tensors, in one process: run with `pytest -m gpu` on a machine that has a GPU.

`python -m tests.gpu` shows what workers do with them.
"""

from __future__ import annotations

import pytest

import nbelastic as nbe

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


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
