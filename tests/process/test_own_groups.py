"""Groups that the program makes with torch.distributed belong to the world: a loss wakes ranks that block in them."""

import os
import signal
from pathlib import Path

import pytest

import nbelastic as nbe
from tests.process import programs
from tests.process.training import Training
from tests.support.waiting import until

pytestmark = pytest.mark.on_both


def meet_in_groups(folder):
    """Use two groups of the program in every step. With the file `hold` the last rank touches `waits`, and blocks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    log = programs.Log(folder)
    state = nbe.ObjectState(step=0)

    @nbe.elastic
    def loop(state):
        pairs, _ = dist.new_subgroups_by_enumeration([[*range(nbe.size())]])
        mesh = init_device_mesh("cpu", (nbe.size(),), mesh_dim_names=("data",))
        while not programs.any_rank_finds(folder, "finish"):
            for group in (dist.new_group([*range(nbe.size())]) if state.step == 0 else pairs, mesh.get_group("data")):
                if nbe.rank() == nbe.size() - 1 and (Path(folder) / "hold").exists():
                    (Path(folder) / "waits").touch()
                    while True:
                        signal.pause()
                one = torch.ones(1)
                dist.all_reduce(one, group=group)
                if one.item() != nbe.size():  # NCCL raises nothing after an abort
                    raise RuntimeError(f"the sum of {nbe.size()} ones is {one.item()}")
            state.step += 1
            log(step=state.step, generation=programs.generation(), sum="")
            state.commit()
        return {"step": state.step, "sum": "", "pid": os.getpid()}

    return loop(state)


@pytest.mark.soak(share=0.2)
def test_ranks_that_wait_in_a_group_of_their_own_are_woken_and_not_replaced(make, tmp_path):
    """When ranks wait in a group of the program for a rank that is killed, they raise, and then train on."""
    training = Training(make("localhost:3", min=1, max=3), tmp_path / "steps", meet_in_groups)
    for _ in range(3):
        ranks = training.wait_for_world(3)
        (training.folder / "hold").touch()
        until((training.folder / "waits").exists)
        for name in ("hold", "waits"):
            (training.folder / name).unlink()
        training.signal_worker(ranks[-1])
        after = {worker.pid for worker in training.wait_for_world(3)}
        assert {worker.pid for worker in ranks[:-1]} <= after
    training.finish()
    lost = [event.text for event in training.cluster.events if event.kind == "worker-lost"]
    assert all("SIGKILL" in text for text in lost), lost
    assert len(lost) == 3


def destroy_a_group():
    """Make and destroy a group on every rank; then rank 1 raises an error of the program."""
    import torch
    import torch.distributed as dist

    @nbe.elastic
    def loop(state):
        group = dist.new_group([*range(nbe.size())])
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        del group
        dist.barrier()
        if nbe.rank() == 1:
            raise RuntimeError("sizes differ")
        dist.barrier()

    return loop(nbe.ObjectState())


def test_an_error_after_a_group_was_destroyed_is_the_programs_own(make):
    """Connections that the program closed do not count as lost: the job fails at once, and no further generation forms."""
    cluster = make("localhost:2", min=2)
    error = str(cluster.run(destroy_a_group).exception(timeout=60))
    assert "raised RuntimeError: sizes differ" in error
    assert "in a row" not in error
