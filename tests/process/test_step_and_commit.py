"""A worker is lost between the optimizer's step and the commit: the step counts once, or not at all."""

import time
from pathlib import Path

import pytest

import nbelastic as nbe
from tests.process import programs
from tests.support.waiting import until

pytestmark = pytest.mark.on_both
RATE = 0.5


def train(folder, steps_per_commit):
    """Lower one weight by RATE in each step, so that it shows how many steps were taken.

    Between the step and the commit the ranks average a number, as a program that logs its loss does. A rank whose file
    `wait-RANK-SIZE` exists waits there.
    """
    import torch
    import torch.distributed as dist

    log = programs.Log(folder)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=RATE)
    state = nbe.TorchState(weight=weight, optimizer=optimizer, step=0)

    @nbe.elastic
    def loop(state):
        while not programs.any_rank_finds(folder, "finish"):
            for _ in range(steps_per_commit):
                optimizer.zero_grad()
                weight.sum().backward()
                dist.all_reduce(weight.grad)
                weight.grad /= nbe.size()
                optimizer.step()
                state.step += 1
            log(step=state.step, generation=programs.generation(), rank=nbe.rank(), weight=weight.item())
            while (Path(folder) / f"wait-{nbe.rank()}-{nbe.size()}").exists():
                time.sleep(0.01)
            dist.all_reduce(torch.ones(1))
            state.commit()
            time.sleep(programs.PAUSE)
        return state.step, weight.item()

    return loop(state)


@pytest.mark.parametrize("steps_per_commit", [1, 3])
@pytest.mark.soak(share=0.2)
def test_a_step_is_not_taken_twice(trains, steps_per_commit):
    """When a rank is lost after all have stepped and before any could commit, the others resume from the commit."""
    training = trains("localhost:3", train, {"steps_per_commit": steps_per_commit}, min=1, max=3)
    for victim in (0, 2, 1):
        workers = training.wait_for_world(3)
        wait = training.folder / f"wait-{victim}-3"
        wait.touch()
        until(lambda wait=wait: _all_wait(training), what="all to wait between step and commit")
        training.signal_worker(workers[victim])
        wait.unlink()
    training.wait_for_world(3)
    (training.folder / "finish").touch()
    results = training.job.result(timeout=30)
    assert len(set(results)) == 1
    step, weight = results[0]
    assert weight == -RATE * step
    assert all(line["weight"] == -RATE * line["step"] for line in training.lines())
    assert (
        "a collective runs between optimizer.step() and state.commit()" in training.job.logs() or steps_per_commit > 1
    )


def _all_wait(training):
    """Whether all three ranks have made the same step of this generation, and no other for 0.3 s."""
    generation = training.cluster.status().generation
    last = {}
    for line in training.lines():
        if line["generation"] == generation:
            last[line["pid"]] = line
    still = all(time.time() - line["t"] > 0.3 for line in last.values())
    return still and len(last) == 3 and len({line["step"] for line in last.values()}) == 1
