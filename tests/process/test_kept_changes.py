"""Changes since the newest commit that a break cannot undo, as commits copied nothing, are reported."""

import os
import signal
from pathlib import Path

import pytest

import nbelastic as nbe
from tests.process.programs import network
from tests.support.waiting import until


@pytest.mark.parametrize("change", ["weight", "layer", "none"])
def test_a_change_that_cannot_be_undone_is_said(make, tmp_path, change):
    """Weights that an evaluation swaps for averaged ones: if a rank is lost meanwhile, the others train on with those."""

    def program(folder):
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        model, optimizer = network()
        state = nbe.TorchState(model=model, optimizer=optimizer, step=0)

        @nbe.elastic
        def loop(state):
            ddp = DistributedDataParallel(state.model)
            changed = Path(folder) / "changed"
            while state.step < 3 or not changed.exists():
                optimizer.zero_grad()
                ddp(torch.ones(2, 16)).sum().backward()
                optimizer.step()
                state.step += 1
                state.commit()
                if state.step < 3 or nbe.size() < 2:
                    continue
                if change == "weight":
                    with torch.no_grad():
                        next(model.parameters()).zero_()
                elif change == "layer":
                    model.added = torch.nn.Linear(1, 1)
                if nbe.rank() == 0:
                    until(changed.exists, what="the change of rank 1")
                    os.kill(os.getpid(), signal.SIGKILL)
                changed.touch()
                dist.barrier()
            return nbe.size()

        return loop(state)

    cluster = make("localhost:2", min=1, max=2)
    job = cluster.run(program, str(tmp_path))
    job.wait(timeout=30)
    lines = [line for line in str(job.logs()).splitlines() if "the training goes on from commit" in line]
    assert len(lines) == (change != "none"), lines
    if lines:
        said = "layers were added" if change == "layer" else "has changed outside an optimizer's step"
        assert said in lines[0]


def test_survivors_agree_on_a_target_network_that_one_of_them_has_moved(make, tmp_path):
    """It moves through `.data`, which PyTorch does not count. One survivor was faster than the other when a rank was lost."""

    def program(folder):
        import torch
        import torch.distributed as dist

        model, optimizer = network()
        target = torch.nn.Linear(600, 600, bias=False)  # more than a MiB
        target.weight.data.zero_()
        state = nbe.TorchState(model=model, target=target, optimizer=optimizer, step=0)

        @nbe.elastic
        def loop(state):
            changed = Path(folder) / "changed"
            while state.step < 4 or not changed.exists():
                for _ in range(2):  # so commits copy
                    optimizer.zero_grad()
                    model(torch.ones(2, 16)).sum().backward()
                    optimizer.step()
                target.weight.data.add_(1)
                state.step += 1
                state.commit()
                if state.step < 4 or nbe.size() < 3:
                    continue
                if nbe.rank() == 0:
                    until(changed.exists, what="the change of rank 2")
                    os.kill(os.getpid(), signal.SIGKILL)
                if nbe.rank() == 2:
                    target.weight.data.add_(1)
                    changed.touch()
                dist.barrier()
            return float(target.weight[0, 0])

        return loop(state)

    cluster = make("localhost:3", min=2, max=3)
    values = cluster.run(program, str(tmp_path)).result(timeout=30)
    assert len({*values}) == 1, values
