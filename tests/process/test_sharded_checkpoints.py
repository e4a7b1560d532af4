"""Checkpoints of a sharded training: written by all ranks, read at any world size, by plain torch too; and after a loss."""

import contextlib
import os
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import nbelastic as nbe
from tests.process import sharded_program
from tests.process.training import Training, lines_in
from tests.support.waiting import until

EXACT = {"rtol": 0, "atol": 0}


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    """`clusters(size)`: a cluster of so many workers of one host, for all tests of the module."""
    started = {}

    def start(size):
        if size not in started:
            folder = tmp_path_factory.mktemp("logs")
            started[size] = nbe.Cluster(f"localhost:{size}", min=size, cooldown=(0, 0), stop_timeout=5, log_dir=folder)
            started[size].start(timeout=60)
        return started[size]

    yield start
    for cluster in started.values():
        cluster.stop()


@pytest.fixture
def lossy(tmp_path):
    """`lossy(hosts, …)`: train on a cluster of its own, which may lose workers."""
    with contextlib.ExitStack() as started:

        def start(hosts, **kwargs):
            cluster = nbe.Cluster(hosts, min=1, cooldown=(0, 0), stop_timeout=5, log_dir=tmp_path / "logs")
            started.enter_context(cluster)
            return Training(cluster, tmp_path / "lossy", sharded_program.train, **kwargs)

        yield start


@pytest.fixture
def run(clusters, tmp_path):
    """`run(size, …)`: train on so many workers."""
    number = iter(range(10))
    return lambda size, **kwargs: Training(
        clusters(size), tmp_path / f"run{next(number)}", sharded_program.train, **kwargs
    )


def results_of(training, timeout=60):
    """The result of all ranks, which is the same."""
    results = training.job.result(timeout=timeout)
    assert all(result == results[0] for result in results)
    return results[0]


def beginnings(training):
    """The step and the commit at which the ranks began, by generation."""
    return {(line["begin"], line["commits"]) for line in lines_in(training.folder) if "begin" in line}


def assert_same(found, expected, **tolerance):
    """The same values under the same names."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value), **tolerance)


def commits_in(folder):
    """The commit of each checkpoint, in the order in which they were written."""
    return [int(path.name.rpartition("-")[2]) for path in sorted(folder.glob("0*"))]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_reads_and_writes_the_same_format(run, clusters, tmp_path):
    """Four ranks write; torch alone reads it in one process and in three, which write it; two ranks go on from that."""
    kept = tmp_path / "kept"
    end = results_of(run(4, steps=6, checkpoint=kept, checkpoint_every=4))
    assert commits_in(kept) == [4, 6]
    (newest,) = kept.glob("*-commit-6")
    assert len(list(newest.glob("*.distcp"))) == 4

    model = sharded_program.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=newest)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same(sharded_program.values_of(model, optimizer), end["values"], **EXACT)

    plain = clusters(3).run(sharded_program.plain_program, str(tmp_path), str(newest), 3)
    for found in plain.result(timeout=60):
        assert_same(found, end["values"], **EXACT)

    training = run(2, load=str(tmp_path / "plain"), steps=1)
    results_of(training)
    assert beginnings(training) == {(0, 0)}
    text = "was not written by nbelastic: it has no counters and other small values."
    assert text in training.job.logs(rank=0)
    training = run(2, load=str(tmp_path / "plain"))
    (training.folder / "finish").touch()
    assert_same(results_of(training)["values"], end["values"], **EXACT)


def test_a_job_goes_on_from_its_newest_checkpoint_at_another_size(run, tmp_path):
    """Two ranks go on where four ended, and reach the values of an undisturbed training."""
    kept = tmp_path / "kept"
    undisturbed = results_of(run(4, steps=9))
    results_of(run(4, steps=6, checkpoint=kept, checkpoint_every=100))
    second = run(2, steps=9, checkpoint=kept, checkpoint_every=100)
    end = results_of(second)
    assert beginnings(second) == {(6, 6)}
    assert "the training continues at commit 6, from" in second.job.logs(rank=0)
    assert_same(end["values"], undisturbed["values"], rtol=1e-5, atol=1e-6)
    assert commits_in(kept) == [6, 9]
    assert [path.name for path in kept.glob(".*")] == [".used-by"]


@pytest.mark.parametrize("inside", [False, True])
def test_save_and_load(run, tmp_path, inside):
    """`state.save` in the loop, and `state.load` before the elastic function or in it: counters and all values."""
    saved = str(tmp_path / "saved")
    first = results_of(run(4, steps=5, save={5: saved}))
    second = run(2, steps=5, load=saved, load_inside=inside)
    assert results_of(second) == first


def test_the_state_is_lost_and_all_go_back_to_the_newest_checkpoint(lossy, tmp_path, run):
    """Two of three hosts are lost at once; the job goes on from its checkpoint, with the values of an undisturbed run."""
    kept = tmp_path / "kept"
    hosts = "localhost:1,127.0.0.2:1,127.0.0.3:1"
    training = lossy(hosts, pause=0.03, checkpoint=kept, checkpoint_every=5)
    workers = training.wait_for_world(3)
    until(lambda: commits_in(kept), what="a checkpoint")
    for worker in workers[:2]:  # the copy of rank 0 is on the host of rank 1
        os.kill(worker.pid, signal.SIGKILL)
    text = "The training goes back to commit "
    until(lambda: text in training.job.logs(), 60, text)
    line = next(line for line in training.job.logs().splitlines() if text in line)
    back = int(line.partition(text)[2].partition(",")[0])
    assert back > 0
    assert back % 5 == 0
    assert f"no worker is left with the shards of rank 0 ({workers[0].host}) of generation" in line
    assert "commits are lost" in line
    until(lambda: training.lines()[-1]["step"] > back + 3, 60)
    (training.folder / "finish").touch()
    end = results_of(training)
    assert (back, back) in beginnings(training)
    undisturbed = results_of(run(2, steps=end["step"]))
    assert_same(end["values"], undisturbed["values"], rtol=1e-4, atol=1e-5)


def test_a_rank_dies_while_a_checkpoint_is_written(lossy, tmp_path):
    """With a checkpoint at each commit, a kill hits one in the middle: later ones are complete, and no part is left."""
    kept = tmp_path / "kept"
    training = lossy("localhost:3", pause=0.02, checkpoint=kept, checkpoint_every=1)
    workers = training.wait_for_world(3)
    until(lambda: kept.exists() and commits_in(kept), what="a checkpoint")
    os.kill(workers[1].pid, signal.SIGKILL)
    died = training.lines()[-1]["step"]
    until(lambda: commits_in(kept)[-1] > died + 3, 60, "checkpoints of the next generation")
    (training.folder / "finish").touch()
    end = results_of(training)
    assert commits_in(kept)[-1] == end["commits"]
    assert [path.name for path in kept.glob(".*")] == [".used-by"]


def test_a_stopped_job_writes_the_last_commit_of_all_ranks(run, tmp_path):
    """Ranks that are stopped at different points agree on a commit; the next job begins there."""
    kept = tmp_path / "kept"
    training = run(4, pause=0.01, checkpoint=kept, checkpoint_every=1000)
    training.wait_for_world(4)
    until(lambda: training.lines()[-1]["step"] > 10)
    training.job.stop()
    until(lambda: commits_in(kept), 30, "the last checkpoint")
    (newest,) = commits_in(kept)
    made = max(line["step"] for line in training.lines())
    assert made - 2 <= newest <= made
    second = run(2, steps=newest, checkpoint=kept)
    assert results_of(second)["step"] == newest


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_training(run, tmp_path):
    """The folder is gone: one line on stderr, and all steps are made."""
    kept = tmp_path / "kept"
    training = run(2, pause=0.02, checkpoint=kept, checkpoint_every=1000)
    training.wait_for_world(2)
    (kept / ".used-by").unlink()
    kept.rmdir()
    kept.write_text("not a folder")
    before = training.lines()[-1]["step"]
    until(lambda: training.lines()[-1]["step"] > before + 3)
    (training.folder / "finish").touch()
    assert results_of(training)["step"] > before
    assert "there is no checkpoint of the last commit" in training.job.logs(rank=0)
