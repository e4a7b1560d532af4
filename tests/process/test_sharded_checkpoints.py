"""Checkpoints of a sharded training: written by all ranks, read at any world size, by plain torch too; and after a loss."""

import json
import os
import signal

import pytest
import torch
import torch.multiprocessing as mp

from tests.process import sharded_program
from tests.process.training import Training, lines_in
from tests.support.waiting import until

HOSTS = "localhost:1,127.0.0.2:1,127.0.0.3:1"
EXACT = {"rtol": 0, "atol": 0}


@pytest.fixture
def run(make, tmp_path):
    """`run(hosts, …)`: train on a new cluster."""

    def start(hosts, *, number=1, minimum=1, **kwargs):
        cluster = make(hosts, min=minimum)
        return Training(cluster, tmp_path / f"run{number}", sharded_program.train, **kwargs)

    return start


def results_of(training, timeout=60):
    """The result of all ranks, which is the same."""
    results = training.job.result(timeout=timeout)
    assert all(result == results[0] for result in results)
    return results[0]


def assert_same(found, expected, **tolerance):
    """The same values under the same names."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value), **tolerance)


def commits_in(folder):
    """The commit of each checkpoint, in the order in which they were written."""
    return [int(path.name.rpartition("-")[2]) for path in sorted(folder.glob("0*"))]


def in_plain_processes(function, size, tmp_path, path):
    """What `function` finds in `size` processes without nbelastic."""
    result = tmp_path / f"result-{size}"
    store = tmp_path / f"store-{size}-{function.__name__}"
    mp.spawn(function, (size, str(store), str(path), str(result)), size)
    return json.loads(result.read_text())


def test_plain_torch_reads_it_at_any_world_size(run, tmp_path):
    """Four ranks write; `dcp.load` and `set_state_dict` in one process and in three get the values of all ranks."""
    kept = tmp_path / "kept"
    end = results_of(run("localhost:4", minimum=4, steps=6, checkpoint=kept, checkpoint_every=4))
    assert commits_in(kept) == [4, 6]
    (newest,) = kept.glob("*-commit-6")
    assert len(list(newest.glob("*.distcp"))) == 4
    for size in (1, 3):
        found = in_plain_processes(sharded_program.plain, size, tmp_path, newest)
        assert_same(found, end["values"], **EXACT)


def test_a_job_goes_on_from_its_newest_checkpoint_at_another_size(run, tmp_path):
    """Two ranks go on where four ended, and reach the values of an undisturbed training."""
    kept = tmp_path / "kept"
    undisturbed = results_of(run("localhost:1", steps=9))
    results_of(run("localhost:4", number=2, minimum=4, steps=6, checkpoint=kept, checkpoint_every=100))
    second = run("localhost:2", number=3, minimum=2, steps=9, checkpoint=kept, checkpoint_every=100)
    end = results_of(second)
    assert {(line["begin"], line["commits"]) for line in lines_in(second.folder) if "begin" in line} == {(6, 6)}
    assert "the training continues at commit 6, from" in second.job.logs(rank=0)
    assert_same(end["values"], undisturbed["values"], rtol=1e-5, atol=1e-6)
    assert commits_in(kept) == [6, 9]


@pytest.mark.parametrize("inside", [False, True])
def test_save_and_load(run, tmp_path, inside):
    """`state.save` in the loop, and `state.load` before the elastic function or in it: counters and all values."""
    saved = tmp_path / "saved"
    first = results_of(run("localhost:3", minimum=3, steps=5, save={5: str(saved)}))
    second = run("localhost:2", number=2, minimum=2, steps=5, load=str(saved), load_inside=inside)
    assert results_of(second) == first


def test_a_checkpoint_that_plain_torch_wrote(run, tmp_path):
    """Model and optimizer are loaded; counters keep their values, and one line says so."""
    expected = in_plain_processes(sharded_program.plain_training, 2, tmp_path, tmp_path / "plain")
    training = run("localhost:3", minimum=3, load=str(tmp_path / "plain"))
    training.wait_for_world(3)
    (training.folder / "finish").touch()
    results_of(training)
    text = "was not written by nbelastic: it has no counters and other small values."
    assert text in training.job.logs(rank=0)
    assert next(line for line in lines_in(training.folder) if "begin" in line)["begin"] == 0
    second = run("localhost:2", number=2, minimum=2, load=str(tmp_path / "plain"))
    (second.folder / "finish").touch()
    assert_same(results_of(second)["values"], expected, **EXACT)


def kill_a_pair(training):
    """Kill ranks 0 and 1 of three, each on a host of its own: rank 1 has the only copy of the shard of rank 0."""
    workers = training.wait_for_world(3)
    for worker in workers[:2]:
        os.kill(worker.pid, signal.SIGKILL)


def test_two_of_a_pair_die_and_all_go_back_to_the_newest_checkpoint(run, tmp_path):
    """The state is lost with both; the job goes on from its newest checkpoint, with the values of an undisturbed run."""
    kept = tmp_path / "kept"
    training = run(HOSTS, pause=0.03, checkpoint=kept, checkpoint_every=5)
    until(lambda: commits_in(kept), what="a checkpoint")
    kill_a_pair(training)
    text = "The training goes back to commit "
    until(lambda: text in training.job.logs(), 30, text)
    line = next(line for line in training.job.logs().splitlines() if text in line)
    back = int(line.partition(text)[2].partition(",")[0])
    assert back > 0
    assert back % 5 == 0
    assert "no worker is left with the shards of rank 0 (localhost) of generation 1" in line
    assert "commits are lost" in line
    until(lambda: training.lines()[-1]["step"] > back + 3, 30)
    (training.folder / "finish").touch()
    end = results_of(training)
    assert {one["commits"] for one in lines_in(training.folder) if "begin" in one} >= {0, back}
    undisturbed = results_of(run("localhost:1", number=2, steps=end["step"]))
    assert_same(end["values"], undisturbed["values"], rtol=1e-4, atol=1e-5)


def test_a_stopped_job_writes_the_last_commit_of_all_ranks(run, tmp_path):
    """Ranks that are stopped at different points agree on a commit; the next job begins there."""
    kept = tmp_path / "kept"
    training = run("localhost:3", minimum=3, pause=0.01, checkpoint=kept, checkpoint_every=1000)
    training.wait_for_world(3)
    until(lambda: training.lines()[-1]["step"] > 10)
    training.job.stop()
    until(lambda: commits_in(kept), 30, "the last checkpoint")
    training.cluster.stop()
    (newest,) = commits_in(kept)
    made = max(line["step"] for line in training.lines())
    assert made - 2 <= newest <= made
    second = run("localhost:2", number=2, minimum=2, steps=newest, checkpoint=kept)
    assert results_of(second)["step"] == newest


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_training(run, tmp_path):
    """The folder is gone: one line on stderr, and all steps are made."""
    kept = tmp_path / "kept"
    training = run("localhost:2", minimum=2, pause=0.02, checkpoint=kept, checkpoint_every=1000, steps=0, save=None)
    training.wait_for_world(2)
    kept.rmdir()
    kept.write_text("not a folder")
    before = training.lines()[-1]["step"]
    until(lambda: training.lines()[-1]["step"] > before + 3)
    (training.folder / "finish").touch()
    assert results_of(training)["step"] > before
    assert "there is no checkpoint of the last commit" in training.job.logs(rank=0)
