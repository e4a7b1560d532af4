"""A new program takes over a sharded training."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading

import pytest

import nbelastic as nbe
from nbelastic.client.pickled_calls import pickle_call
from nbelastic.client.submission import _save_call
from nbelastic.errors import JobError, UsageError
from nbelastic.protocol import requests, worker_messages
from tests.process import programs, sharded_training
from tests.process.training import Training, by_rank
from tests.support import soak
from tests.support.nccl_double import CLUSTERS
from tests.support.waiting import until

pytestmark = pytest.mark.on_both
SAME = 1e-9  # relative, in double precision
CELL = """\
import gc, torch, nbelastic as nbe
from torch.distributed.fsdp import fully_shard
state = nbe.ShardedState(step=0)
"""
TRAIN = """\
@nbe.elastic
def train(state):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    fully_shard(model, mesh=nbe.device_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr={lr})
    state.bind(model=model, optimizer=optimizer)
    {first}
    while True:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        state.commit()
train(state)
"""
LOOK = """\
def look():
    gc.collect()
    (group,), (entry, *_) = state.optimizer.param_groups, state.optimizer.state.values()
    same = {state.step, int(entry["step"]), int(state.model[1].num_batches_tracked)}
    models = sum(type(one).__name__ == "FSDPSequential" for one in gc.get_objects())
    return group["lr"], len(same), state.step > 2, models
look()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, backend):
    """Two hosts with two workers each, for one test after another."""
    logs = tmp_path_factory.mktemp("logs")
    options = {"cooldown": (0, 0), "log_dir": logs, **CLUSTERS[backend]}
    with nbe.Cluster("localhost:2,127.0.0.2:2", min=1, max=4, **options) as one:
        yield one


@pytest.fixture
def training(cluster, tmp_path):
    """A training that four ranks begin."""
    until(lambda: sum(w.state == "ready" for w in cluster.workers) == 4)
    found = Training(cluster, tmp_path / "steps", sharded_training.train)
    found.wait_for_world(4)
    yield found
    if not found.job.done():
        found.job.stop()
        found.job.wait(timeout=20)


def swap(training, **options):
    return training.cluster.run(sharded_training.train, str(training.folder), swap=True, **options)


def begin_trial(training, **options):
    """Begin a swap to a program that waits in its first world until a file is removed; returns the file and the answer."""
    wait = training.folder / "wait"
    begins = len(training.lines("begin"))
    wait.touch()
    call = pickle_call(sharded_training.train, (str(training.folder),), options)
    link = training.cluster._link
    program = worker_messages.Program("", "", None, "", _save_call(link, call))
    answer = link.running().request(requests.Swap("you", program))
    size = len(by_rank(training.cluster))
    until(lambda: len(training.lines("begin")) >= begins + size, what="the new program to begin")
    return wait, answer


def finish(training, world=4):
    """End the training, and check that its weights are those of an undisturbed one with the same learning rates."""
    training.wait_for_world(world)
    (training.folder / "finish").touch()
    results = training.job.result(timeout=30)
    rates = sharded_training.rates_in(training.lines())
    assert len({result["step"] for result in results}) == 1
    assert sharded_training.difference(results, rates) < SAME
    return rates


def lost_steps(training):
    """How many steps were made twice by rank 0."""
    steps = [line["step"] for line in training.lines() if line["rank"] == 0]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1)), "a step is missing"
    return len(steps) - len(set(steps))


def test_an_edited_program_takes_over(training):
    """The new learning rate counts; weights, momentum and position in the data go on. No step is lost."""
    swap(training, lr=0.002)
    training.wait_for_world(4)
    assert {*finish(training)} == {sharded_training.RATE, 0.002}
    assert lost_steps(training) == 0


def test_a_broken_program_does_not_end_the_old_one(training):
    """The old one goes on from the commit at which it was left, though the new one has spoilt its own weights."""
    for _ in range(2):
        with pytest.raises(JobError, match="ValueError: no batch") as raised:
            swap(training, lr=0.5, fails=True)
        assert "goes on" in str(raised.value)
        assert "sharded_training.py" in raised.value.remote_traceback
    assert {*finish(training)} == {sharded_training.RATE}
    assert lost_steps(training) == 0


def test_more_layers_on_another_mesh(training, capsys):
    """Layers of the same name and shape are taken over and re-sharded, the new one begins afresh, and a line says so."""
    swap(training, lr=0.0, layers=4, shard=2)  # with this rate the weights stay as they were at the swap
    assert "has new parameters model.3.bias, model.3.weight" in capsys.readouterr().out
    training.wait_for_world(4)
    (training.folder / "finish").touch()
    results = training.job.result(timeout=30)
    rates = sharded_training.rates_in(training.lines())
    assert sharded_training.difference([{**one, "step": rates.index(0.0)} for one in results], rates) < SAME
    assert all(one["weights"][6].equal(results[0]["weights"][6]) for one in results)
    assert results[0]["weights"][6].abs().sum() > 0
    assert lost_steps(training) == 0


def test_a_cell_that_uses_the_state_of_the_old_one(cluster):
    """If it fails, the state is as it was; if it works, it goes on with it. The old models are freed."""

    def look():
        until(lambda: (cluster.status().step or 0) > 2)
        cells = cluster.execute(LOOK, at_commit=True)
        return {one.error or json.loads(one.displays[-1])[0]["text/plain"] for one in cells}

    until(lambda: sum(w.state == "ready" for w in cluster.workers) == 4)
    cluster.run_cell(CELL + TRAIN.format(lr=0.25, first=""))
    cluster.wait(4)
    assert look() == {"(0.25, 1, True, 1)"}
    with pytest.raises(JobError, match="ZeroDivisionError"):
        cluster.run_cell(TRAIN.format(lr=0.5, first="state.step = optimizer.step() or -1000; 1 / 0"), swap=True)
    assert look() == {"(0.25, 1, True, 1)"}
    cluster.run_cell(TRAIN.format(lr=0.5, first=""), swap=True)
    assert look() == {"(0.5, 1, True, 1)"}
    cluster.stop_job()


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_dies_while_a_program_is_tried(training, fails):
    """The others go on with it; if it then fails, the old one has the dead rank's part from its copies."""
    wait, answer = begin_trial(training, lr=0.002, fails=fails)
    training.signal_worker(by_rank(training.cluster)[2])
    wait.unlink()
    outcome = answer.result(timeout=20)
    assert outcome.error == ("ValueError: no batch" if fails else "")
    assert finish(training)[-1] == (sharded_training.RATE if fails else 0.002)
    assert lost_steps(training) == 0


@pytest.mark.soak(share=0.2)
def test_the_old_state_is_not_left_on_one_rank(tmp_path):
    """If one more loss would take the old program's state, the trial ends, and the old program copies it again."""
    hosts = "localhost:1,127.0.0.2:1,127.0.0.3:1"
    with nbe.Cluster(hosts, min=1, max=3, cooldown=(0, 0), log_dir=tmp_path / "logs") as cluster:
        training = Training(cluster, tmp_path / "steps", sharded_training.train)
        training.wait_for_world(3)
        wait, answer = begin_trial(training, lr=0.002)
        training.signal_worker(by_rank(cluster)[1])
        wait.unlink()
        assert "a part of the old program's state is left on one worker at most" in answer.result(timeout=20).error
        assert {*finish(training, 3)} == {sharded_training.RATE}
    assert lost_steps(training) == 0


def test_a_program_with_another_kind_of_state_is_refused(training):
    """One line says what to do. The old program goes on."""
    with pytest.raises(JobError, match=r"is a TorchState, and that of the old one a ShardedState.* as a new job"):
        training.cluster.run(programs.train, str(training.folder), swap=True)
    finish(training)


@pytest.mark.soak(seconds=20)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [1, 4])
def test_random_kills_beside_swaps_change_no_weight(tmp_path, backend, every):
    """Good and broken programs, and kills at any moment: the weights are those of an undisturbed training."""
    chance, kills = soak.chances("swaps", every), 0
    options = {"cooldown": (0, 0), "log_dir": tmp_path / "logs", **CLUSTERS[backend]}
    with nbe.Cluster("localhost:2,127.0.0.2:2", min=1, max=4, **options) as cluster:
        training = Training(cluster, tmp_path / "steps", sharded_training.train, every=every)
        while kills < soak.repetitions(30):
            training.wait_for_world(4)
            victim, later = chance.choice(by_rank(cluster)), chance.uniform(0, 0.3)
            timer = threading.Timer(later, os.kill, (victim.pid, signal.SIGKILL))
            timer.start()
            with contextlib.suppress(JobError, UsageError):  # the old program goes on
                swap(training, every=every, fails=chance.random() < 0.3)
            timer.join()
            until(lambda lost=victim.id: all(w.id != lost for w in cluster.workers))
            kills += 1
        finish(training)
