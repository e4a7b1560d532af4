"""Values of the notebook on the workers, and the training state in the notebook."""

from __future__ import annotations

import pytest
import torch

import nbelastic as nbe
from tests.process import sharded_training
from tests.process.programs import notebook_function
from tests.process.training import Training
from tests.support.processes import run_folder
from tests.support.waiting import until


def test_pushed_values_are_on_present_and_later_workers(make):
    """Cells and functions find the newest ones. They are one object if they were, and files of replaced ones are removed."""
    cluster = make("localhost:1", min=1, max=3)
    first = torch.arange(100_000)
    cluster.push(data=first, again=first, lr=0.1)
    cluster.push({"lr": 0.2})
    cluster.push(lr=0.3)
    cluster.add_host("127.0.0.2:1")
    cluster.wait(2)
    outputs = cluster.execute("print(data.sum().item(), again is data, lr)")
    assert [output[1:] for output in outputs] == [(f"{first.sum().item()} True 0.3\n", "", None)] * 2

    program = notebook_function("def program(): return lr, data.sum().item()")
    assert cluster.run(program).result(timeout=20) == [(0.3, first.sum().item())] * 2
    assert list(cluster.setup_cells.values()) == ["# pushed: data, again, lr (0.8 MB)", "# pushed: lr (0.0 MB)"]
    files = list(run_folder(cluster).rglob("*.pushed"))
    assert len(files) == 2
    cluster.clear_setup()
    until(lambda: not any(path.exists() for path in files), what="the files to be removed")


def test_the_state_of_a_running_training(trains):
    """Rank 0 copies it at a commit; the training loses no step. After the end it is the final one, until another job begins."""
    training = trains("localhost:2", min=1)
    training.wait_for_world(2)
    job = training.job
    with pytest.raises(nbe.UsageError, match=r"job-1 is running: values are pushed between jobs\. Change"):
        training.cluster.push(x=1)
    state = job.state_dict(timeout=20)
    assert 0 < state["step"] < job.state_dict("step", timeout=20)
    assert all(not tensor.requires_grad for tensor in state["model"].values())
    with pytest.raises(nbe.UsageError, match="this state has no 'nothing'; it holds "):
        job.state_dict("nothing", timeout=20)
    results = training.finish()
    assert job.state_dict("step") == results[0]["step"]
    training.cluster.run(int).result(timeout=20)
    with pytest.raises(nbe.UsageError, match=r"a later job has begun, .* It is in a checkpoint if the job"):
        job.state_dict()
    with pytest.raises(nbe.UsageError, match="the job has run no elastic function"):
        training.cluster.job.state_dict()
    assert not list(run_folder(training.cluster).rglob("states/*"))
    training.cluster.stop()
    with pytest.raises(nbe.ClusterStoppedError, match="only a checkpoint has it now"):
        job.state_dict()


def test_a_state_is_sent_when_the_worker_that_holds_it_has_died(make):
    """Another rank has the same one. Without any, one line names the checkpoint."""
    cluster = make("localhost:2", min=2)

    def program():
        @nbe.elastic
        def train(state):
            state.commit()

        train(nbe.ObjectState(step=3))

    job = cluster.run(program)
    job.result(timeout=20)
    first, second = cluster.workers
    cluster.restart(first.id)
    until(lambda: all(worker.id != first.id for worker in cluster.workers))
    assert job.state_dict() == {"step": 3}
    cluster.restart(second.id)
    until(lambda: all(worker.id != second.id for worker in cluster.workers))
    with pytest.raises(
        nbe.UsageError, match=r"the workers that held the training state of job-1 have ended\. It is in a"
    ):
        job.state_dict()


def test_a_sharded_state_is_refused_in_words(make, tmp_path):
    """The training goes on."""
    training = Training(make("localhost:2", min=1), tmp_path / "steps", sharded_training.train)
    training.wait_for_world(2)
    with pytest.raises(
        nbe.UsageError, match=r"the state is sharded, so no rank has all of it: save it with state\.save"
    ):
        training.job.state_dict(timeout=20)
    assert training.job.state_dict("step", timeout=20) > 0
    training.job.stop()
