"""A job that is lost as a whole resumes from its newest checkpoint, in another cluster and at another world size."""

import contextlib
import os
import signal
import time

import pytest

import nbelastic as nbe
from tests.process import programs
from tests.process.training import Training
from tests.support.processes import descendants, processes_of
from tests.support.waiting import until


def train(folder, width=16):
    """Train until `folder/finish` exists, and log where each world began."""
    import torch

    log = programs.Log(folder)
    torch.manual_seed(os.getpid())
    model = torch.nn.Linear(width, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)

    @nbe.elastic
    def loop(state):
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        log(begin=state.step, commits=state.commits, sum=programs.checksum(model), generation=programs.generation())
        while not programs.any_rank_finds(folder, "finish"):
            loss = ddp(torch.randn(8, width)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step += 1
            log(step=state.step, sum=programs.checksum(model), generation=programs.generation(), rank=nbe.rank())
            state.commit()
            time.sleep(programs.PAUSE)
        return {"step": state.step, "commits": state.commits, "sum": programs.checksum(model)}

    return loop(state)


@pytest.fixture
def runs(make, trains_on, tmp_path):
    """`runs(number, hosts)`: train on a new cluster, or without hosts on that of all tests, into one folder of checkpoints."""

    def start(number, hosts="", every=5, **kwargs):
        options = {"checkpoint": tmp_path / "kept", "checkpoint_every": every, **kwargs}
        if not hosts:
            return trains_on(train, into=f"run{number}", **options)
        return Training(make(hosts), tmp_path / f"run{number}", train, **options)

    return start


def saved_commits(tmp_path):
    """The commit of each checkpoint, in the order in which they were written."""
    return [int(path.name.rpartition("-")[2]) for path in sorted((tmp_path / "kept").glob("0*"))]


def beginning_of(training):
    """The step, the commit and the weights with which all ranks began."""
    lines = training.lines("begin")
    first = min(line["generation"] for line in lines)
    where = {(line["begin"], line["commits"], line["sum"]) for line in lines if line["generation"] == first}
    assert len(where) == 1
    return where.pop()


def test_a_stopped_cluster_writes_its_last_checkpoint(runs, tmp_path):
    """`cluster.stop()` lets the program end first: the checkpoint has every commit that was made before."""
    training = runs(1, "localhost:2", every=1000)
    training.wait_for_world(2)
    until(lambda: training.lines()[-1]["step"] > 20)
    committed = training.lines()[-1]["step"] - 1  # a step's line is written before its commit
    training.cluster.stop(timeout=60)
    (last,) = saved_commits(tmp_path)
    assert last >= committed


def finish_job(training):
    (training.folder / "finish").touch()
    results = training.job.result(timeout=30)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [("localhost:3", "localhost:2"), pytest.param("localhost:1", "localhost:3", marks=pytest.mark.soak(seconds=6))],
)
def test_everything_is_killed_and_a_smaller_or_larger_world_goes_on(runs, tmp_path, before, after):
    """When every process is killed, the next job begins with the weights of the newest checkpoint on all ranks."""
    others = descendants()
    first = runs(1, before)
    until(lambda: len(saved_commits(tmp_path)) >= 2, what="two checkpoints")
    until(
        lambda: first.cluster.status().checkpoint.commit in saved_commits(tmp_path), what="a report of the newest one"
    )
    for pid in processes_of(first.cluster) - others:
        with contextlib.suppress(ProcessLookupError):  # it has ended together with its parent
            os.kill(pid, signal.SIGKILL)
    first.cluster.stop()
    newest = saved_commits(tmp_path)[-1]
    second = runs(2, after)
    second.wait_for_world(int(after[-1]))
    step, commits, weights = beginning_of(second)
    assert step == commits == newest
    assert {line["sum"] for line in first.lines() if line["step"] == newest} == {weights}
    until(lambda: saved_commits(tmp_path)[-1] > newest, what="the next checkpoint")
    assert finish_job(second)["step"] > newest
    text = f"the training continues at commit {newest}, from "
    until(lambda: text in second.job.logs(rank=0), what=text)


def test_a_job_that_has_ended_ends_at_once_when_run_again(runs, tmp_path):
    """A job saves its end: the same job run again begins there, and ends with the same result."""
    first = runs(1, every=1000)
    first.wait_for_world(3)
    end = finish_job(first)
    assert saved_commits(tmp_path) == [end["commits"]]
    (tmp_path / "run2").mkdir()
    (tmp_path / "run2" / "finish").touch()
    second = runs(2, every=1000)
    assert second.job.result(timeout=30) == [end] * 3
    assert saved_commits(tmp_path) == [end["commits"]]


def test_a_stopped_job_can_be_resumed(runs, tmp_path):
    """When a client stops a job between two checkpoints, one rank saves its last commit."""
    first = runs(1, every=1000)
    first.wait_for_world(3)
    until(lambda: len(first.lines("step")) > 10, what="ten steps")
    first.job.stop()
    until(lambda: saved_commits(tmp_path), what="the last checkpoint")
    (newest,) = saved_commits(tmp_path)
    assert newest >= max(line["step"] for line in first.lines("step")) - 1
    second = runs(2, every=1000)
    second.wait_for_world(3)
    assert beginning_of(second)[:2] == (newest, newest)


def train_and_hang(folder: str) -> None:
    """Train; rank 0 hangs in a collective of its fourth step, as gloo leaves about one rank in a hundred."""
    import torch
    import torch.distributed as dist

    model, optimizer = programs.network()
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)
    wait = compile("__import__('time').sleep(1000)", "/site-packages/torch/distributed/dead.py", "exec")

    @nbe.elastic
    def loop(state):
        while True:
            model(torch.randn(8, 16)).pow(2).mean().backward()
            if state.step == 3 and nbe.rank() == 0:
                open(f"{folder}/hung", "a").close()
                exec(wait)
            dist.all_reduce(next(model.parameters()).grad)
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            state.commit()

    loop(state)


@pytest.mark.soak(share=0.2)
def test_a_hung_worker_of_a_stopped_job_saves_its_last_commit(make, tmp_path):
    """A hung worker of a stopped job writes its last commit, since no other can, and ends only then."""
    cluster = make("localhost:2", min=2)
    job = cluster.run(train_and_hang, str(tmp_path), checkpoint=tmp_path / "kept", checkpoint_every=1000)
    until((tmp_path / "hung").exists)
    job.stop()
    until(lambda: any("exit code 75" in event.text for event in cluster.events))
    assert saved_commits(tmp_path) == [3]


def test_the_writing_rank_dies_and_the_next_one_writes(runs, tmp_path):
    """When rank 0 is killed, the others do not wait for its checkpoint, and the new rank 0 writes the next ones."""
    training = runs(1)
    victim = training.wait_for_world(3)[0]
    until(lambda: saved_commits(tmp_path), what="a checkpoint")
    training.signal_worker(victim)
    last = saved_commits(tmp_path)[-1]
    until(
        lambda: saved_commits(tmp_path)[-1] > last + 5 and len(saved_commits(tmp_path)) >= 3,
        what="checkpoints of another rank",
    )
    finish_job(training)
    names = [path.name for path in (tmp_path / "kept").iterdir()]
    assert len([name for name in names if not name.startswith(".")]) == 3


def test_the_job_ends_as_rank_0_is_lost(make, tmp_path):
    """The rank that is left writes the last commit, as rank 0 would have."""
    cluster = make("localhost:2", min=2, reset_limit=0)
    kept = {"checkpoint": tmp_path / "kept", "checkpoint_every": 1000}
    training = Training(cluster, tmp_path / "run", train, **kept)
    victim = training.wait_for_world(2)[0]
    until(lambda: len(training.lines("step")) > 10, what="some steps")
    training.signal_worker(victim)
    until(lambda: saved_commits(tmp_path), what="the last checkpoint")
    assert saved_commits(tmp_path)[0] >= max(line["step"] for line in training.lines("step")) - 1


def test_two_clusters_and_one_folder(runs, tmp_path):
    """While a job writes checkpoints, that of another cluster waits, and says for what. Then it goes on from the last one."""
    first = runs(1)
    until(lambda: saved_commits(tmp_path), what="a checkpoint")
    second = runs(2, "localhost:1")
    text = f"(its logs are in {first.cluster.log_dir})"
    until(lambda: text in second.job.logs(), what=text)
    end = finish_job(first)
    second.wait_for_world(1)
    assert beginning_of(second) == (end["step"], end["commits"], end["sum"])
    finish_job(second)


def test_the_newest_checkpoint_is_damaged(runs, tmp_path):
    """When the newest checkpoint is damaged, the job uses the one before, and the log says why."""
    first = runs(1)
    until(lambda: len(saved_commits(tmp_path)) >= 2, what="two checkpoints")
    finish_job(first)
    *_, before, newest = saved_commits(tmp_path)
    (damaged,) = (tmp_path / "kept").glob(f"*-commit-{newest}")
    (damaged / "manifest").write_bytes(b"{")
    second = runs(2)
    second.wait_for_world(3)
    assert beginning_of(second)[:2] == (before, before)
    finish_job(second)
    text = f"checkpoint {damaged.name} is not used: manifest is damaged"
    until(lambda: text in second.job.logs(rank=0), what=text)


def test_a_checkpoint_of_another_program(runs, tmp_path):
    """A checkpoint of another program fails the job with the first difference; the files stay as they are."""
    first = runs(1)
    until(lambda: saved_commits(tmp_path), what="a checkpoint")
    finish_job(first)
    there = saved_commits(tmp_path)
    error = runs(2, width=8).job.exception(timeout=30)
    assert "StateError: no checkpoint in" in str(error)
    assert "model.weight is ((4, 8), 'float32') here and ((4, 16), 'float32')" in str(error)
    assert saved_commits(tmp_path) == there


def test_a_folder_that_cannot_be_written(runs, tmp_path):
    """An unwritable folder fails the job at its beginning, with the system's error."""
    (tmp_path / "file").touch()
    job = runs(1, checkpoint=tmp_path / "file" / "below").job
    assert "StateError: checkpoints cannot be written to" in str(job.exception(timeout=30))
