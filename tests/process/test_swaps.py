"""A new program takes over a training. `Training.finish` checks that no step was lost or made twice."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

import nbelastic as nbe
from nbelastic.client.pickled_calls import pickle_call
from nbelastic.client.submission import _save_call
from nbelastic.errors import DriverLostError, JobError, UsageError, WaitTimeoutError
from nbelastic.protocol import requests, worker_messages
from tests.process import programs
from tests.process.training import Training
from tests.support.processes import driver_pid
from tests.support.waiting import until

CELL = """\
import gc, weakref, torch, nbelastic as nbe
torch.manual_seed(nbe.worker.session.current().worker.slot)
model = torch.nn.Linear(2, {width})
optimizer = torch.optim.AdamW(model.parameters(), lr={lr})
state = nbe.TorchState(model=model, optimizer=optimizer, step=0{more})
models = [*globals().get("models", []), weakref.ref(model)]
@nbe.elastic
def train(state):
    net = torch.nn.parallel.DistributedDataParallel(state.model)
    while True:
        state.optimizer.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()
        state.step += 1
        state.commit()
train(state)
"""
FAILING = """\
model = optimizer = name = None
@nbe.elastic
def train(state):
    state.model.weight.data.zero_()
    state.step += 1000
    torch.distributed.all_reduce(torch.ones(1))
    if nbe.rank() == 1:
        {fails}
    open({folder!r} + f"/rank-{{nbe.rank()}}", "w").close()
    state.commit()
train(state)
"""
LOOK = """\
gc.collect()
lr, step = state.optimizer.param_groups[0]['lr'], state.step
[ref() is None for ref in models], lr, step > {step}, state.model.weight.shape[0], state.model.weight.sum().item()
"""


def second(folder: str, trial: str = "") -> dict[str, object]:
    """The new program: it trains on. With a file `trial` in the folder, each worker first waits until that is removed."""
    (Path(folder) / f"began-{os.getpid()}").touch()
    while trial and (Path(folder) / trial).exists():
        time.sleep(0.01)
    return {**programs.train(folder), "program": "second"}


def broken(folder: str, how: str) -> None:
    """A new program that fails before its first commit."""
    if how == "at its top":
        raise ValueError("no data")
    if how == "without a commit":
        return
    if how == "at a breakpoint":
        breakpoint()  # noqa: T100  (it is what this is about)

    @nbe.elastic
    def loop(state):
        import torch

        if how == "in the first step" and nbe.rank() == 1:
            state.model[0].weight.data.zero_()
            raise ValueError("no batch")
        torch.distributed.all_reduce(torch.ones(1))  # the others wait for rank 1
        while how == "never":
            time.sleep(0.01)

    model, optimizer = programs.network()
    loop(nbe.TorchState(model=model, optimizer=optimizer, step=0))


@pytest.fixture
def training(shared_training):
    return shared_training


def swap(training, program, *args, **kwargs):
    return training.cluster.run(program, str(training.folder), *args, swap=True, **kwargs)


def request(training, program, *args):
    """The request for a swap, as `Cluster.run` makes it."""
    call = pickle_call(program, (str(training.folder), *args), {})
    return requests.Swap("you", worker_messages.Program("", "", None, "", _save_call(training.cluster._link, call)))


def begin_trial(training, members):
    """Begin a swap to a program that waits until a file is removed; returns the file, and the driver's answer."""
    wait = training.folder / "wait"
    wait.touch()
    answer = training.cluster._link.running().request(request(training, second, "wait"))
    until(lambda: all((training.folder / f"began-{w.pid}").exists() for w in members), what="the new program to begin")
    return wait, answer


def test_a_new_program_trains_on_without_a_lost_step(training):
    """The job, its processes and its steps go on. A worker that replaces a lost one runs the new program too."""
    job, pids = training.job, {w.pid for w in training.cluster.workers}
    assert swap(training, second).name == job.name
    assert {w.pid for w in training.wait_for_world(3)} == pids
    training.signal_worker(training.wait_for_world(3)[0])
    training.wait_for_world(3)
    assert [result["program"] for result in training.finish()] == ["second"] * 3


def test_new_programs_replace_one_another(training):
    """The value of the job is that of the last one. Kinds of events say what happened."""
    for _ in range(3):
        swap(training, second)
    swap(training, programs.train)
    assert ["program" in result for result in training.finish()] == [False] * 3
    assert [len(training.events(kind)) for kind in ("program-swapped", "world-broken")] == [4, 0]


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("at its top", "ValueError: no data"),
        ("in the first step", "ValueError: no batch"),
        ("without a commit", "ended before its first commit"),
    ],
)
def test_a_broken_program_does_not_end_the_old_one(training, how, error):
    """The client gets its error, with the line; the old program goes on from the commit at which it was left."""
    with pytest.raises(JobError, match=error) as raised:
        swap(training, broken, how)
    assert "goes on" in str(raised.value)
    assert ("test_swaps.py" in raised.value.remote_traceback) == ("ValueError" in error)
    training.wait_for_world(3)
    training.finish()


def test_the_old_program_goes_on_if_nobody_waits_for_the_new_one(training):
    """A new program that hangs in its first step is given up with Ctrl-C or, here, after a time."""
    what = "the new program to make its first commit"
    with pytest.raises(WaitTimeoutError, match=what):
        training.cluster._link.ask(request(training, broken, "never"), 1.5, what, cancel=True)
    training.wait_for_world(3)
    training.finish()


def test_a_new_program_at_a_breakpoint_can_be_given_up(training):
    """Before it has a world, too: the old program goes on."""
    what = "the new program to make its first commit"
    with pytest.raises(WaitTimeoutError, match=what):
        training.cluster._link.ask(request(training, broken, "at a breakpoint"), 2.0, what, cancel=True)
    assert training.events("breakpoint")
    training.wait_for_world(3)
    training.finish()


@pytest.mark.parametrize("dies", [0, 2])
def test_a_worker_that_dies_does_not_end_the_trial(training, dies):
    """The new program takes over on the others. While it is on trial, another new one is refused."""
    members = training.wait_for_world(3)
    wait, answer = begin_trial(training, members)
    with pytest.raises(UsageError, match="another new program"):
        swap(training, second)
    training.signal_worker(members[dies])
    wait.unlink()
    assert answer.result(timeout=20).error == ""
    training.wait_for_world(3)
    assert [result["program"] for result in training.finish()] == ["second"] * 3


def test_the_memory_of_the_old_program_is_freed(make):
    """A cell that is replaced leaves no model behind; what it has edited counts, and what it does not take over is said."""
    cluster = make("localhost:2", min=2)
    cluster.run_cell(CELL.format(width=1, lr=0.25, more=", best=1.0"))
    cluster.wait(2)
    until(lambda: (cluster.status().step or 0) > 2, what="steps")
    step = cluster.status().step
    cluster.run_cell(CELL.format(width=2, lr=0.5, more=""), swap=True)
    found = [
        json.loads(one.displays[-1])[0]["text/plain"] for one in cluster.execute(LOOK.format(step=step), at_commit=True)
    ]
    assert found[0].startswith("([True, False], 0.5, True, 2,"), found
    assert len({*found}) == 1, "layers that begin afresh are equal on all ranks"
    cluster.stop_job()


def look(cluster):
    """The learning rate, whether there were steps, and the model's width and weights, on each rank."""
    cells = cluster.execute(LOOK.format(step=cluster.status().step), at_commit=True)
    return [json.loads(one.displays[-1])[0]["text/plain"].split(", ", 1)[1] for one in cells]


def test_a_cell_that_uses_the_objects_of_the_old_one(make, tmp_path, capsys):
    """If it fails, they are as they were, also on a rank that has made its first commit, and so are the names of cells.

    If it works, it goes on with them, and a line says that other workers lack them.
    """
    cluster, folder = make("localhost:2", min=2), str(tmp_path)
    cluster.run_cell(CELL.format(width=1, lr=0.0, more=""))
    cluster.wait(2)
    before = look(cluster)
    late = "\n".join(
        ["import os", f"        while not os.path.exists({folder + '/rank-0'!r}): pass", "        no_metric"]
    )
    with pytest.raises(JobError, match="no_metric"):
        cluster.run_cell(FAILING.format(folder=folder, fails=late), swap=True)
    assert look(cluster) == before
    works = FAILING.format(folder=folder, fails="pass").replace("state.commit()", "while True: state.commit()")
    cluster.run_cell(works, swap=True)
    assert "only earlier ones define nbe, state, torch. Swap in" in capsys.readouterr().out
    cluster.stop_job()


def test_the_last_checkpoint_of_a_job_that_is_stopped_during_a_trial(make, tmp_path):
    """It is that of the old program's last step, also if the new one hangs. The client learns that the training has ended."""
    saved, cluster = tmp_path / "saved", make("localhost:2", min=2)
    training = Training(cluster, tmp_path / "steps", programs.train, checkpoint=saved, checkpoint_every=10**6)
    _, answer = begin_trial(training, training.wait_for_world(2))
    training.job.stop()
    with pytest.raises(UsageError, match="the training has ended"):
        answer.result(timeout=20)
    last = max(line["step"] for line in training.lines())
    names = [".used-by", f"000001-commit-{last}"]
    until(lambda: sorted(path.name for path in saved.iterdir()) == names, what="the last checkpoint")


def test_workers_that_join_after_a_swap_write_checkpoints(make, tmp_path):
    """They have the job's folder, though the new program came without one: the last checkpoint is theirs."""
    saved = tmp_path / "saved"
    training = Training(make("localhost:2", min=1), tmp_path / "steps", programs.train, checkpoint=saved)
    training.wait_for_world(2)
    swap(training, second)
    for _ in range(2):
        training.signal_worker(training.wait_for_world(2)[0])
    training.wait_for_world(2)
    last = training.finish()[0]["step"]
    assert any(path.name.endswith(f"-commit-{last}") for path in saved.iterdir())


@pytest.mark.parametrize("during", ["the trial", "the training"])
def test_the_next_driver_knows_the_new_program(trains, during):
    """It was saved before the workers kept it. A driver that dies during a trial ends the trial."""
    training = trains("localhost:3", min=1, keep=True)
    members = training.wait_for_world(3)
    if during == "the trial":
        wait, answer = begin_trial(training, members)
        os.kill(driver_pid(training.cluster), signal.SIGKILL)
        with pytest.raises(DriverLostError):
            answer.result(timeout=20)
        wait.unlink()
    else:
        swap(training, second)
        os.kill(driver_pid(training.cluster), signal.SIGKILL)
        training.signal_worker(training.wait_for_world(3)[1])
    training.wait_for_world(3)
    found = [result.get("program") for result in training.finish()]
    assert found == ["second" if during == "the training" else None] * 3


def test_without_a_job_there_is_nothing_to_replace(make):
    """One line says so. Checkpoints are those of the job."""
    cluster = make("localhost:1", min=1)
    with pytest.raises(UsageError, match="no job is running"):
        cluster.run_cell("1", swap=True)
    with pytest.raises(UsageError, match="checkpoints of the job"):
        cluster.run_cell("1", swap=True, checkpoint="here")
