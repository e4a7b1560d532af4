"""A sharded model loses ranks, gains ranks, and trains on as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal

import pytest

import nbelastic as nbe
from tests.process import sharded_training
from tests.process.training import Training, by_rank
from tests.support.nccl_double import CLUSTERS
from tests.support.waiting import until

pytestmark = pytest.mark.on_both
SAME = 1e-9  # relative, in double precision; the order in which gradients are added differs with the world


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, backend):
    """Two hosts with two workers each, for one test after another."""
    logs = tmp_path_factory.mktemp("logs")
    with nbe.Cluster(
        "localhost:2,127.0.0.2:2", min=1, max=4, cooldown=(0, 0), log_dir=logs, **CLUSTERS[backend]
    ) as one:
        yield one


@pytest.fixture
def trains(cluster, tmp_path):
    """`trains(**options)`: a training that four ranks begin."""
    until(lambda: sum(w.state == "ready" for w in cluster.workers) == 4)
    started = []

    def start(**options):
        started.append(Training(cluster, tmp_path / "steps", sharded_training.train, **options))
        started[-1].wait_for_world(4)
        return started[-1]

    yield start
    for training in started:
        if not training.job.done():
            training.job.stop()
            training.job.wait(timeout=20)


def wait_for_steps(training, count):
    """Wait until rank 0 has made `count` more steps."""
    before = training.lines()[-1]["step"]
    until(lambda: training.lines()[-1]["step"] >= before + count)


def kill(training, *ranks):
    """Kill these ranks at once."""
    workers = [by_rank(training.cluster)[rank] for rank in ranks]
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
    until(lambda: not {w.id for w in workers} & {w.id for w in training.cluster.workers})


def finish(training):
    """End the training, and check that its weights are those of an undisturbed one."""
    (training.folder / "finish").touch()
    results = training.job.result(timeout=30)
    assert sharded_training.difference(results) < SAME


def lost_steps(training):
    """For each generation after the first, how many of the steps that all ranks had made were made again."""
    found = {}
    begins = {line["generation"]: line["begin"] for line in training.lines("begin")}
    for generation in sorted(begins)[1:]:
        before = [line for line in training.lines() if line["generation"] < generation]
        last = max(line["generation"] for line in before)
        newest = {}
        for line in before:
            if line["generation"] == last:
                newest[line["rank"]] = line["step"]
        found[generation] = min(newest.values()) - begins[generation]
    return found


@pytest.mark.parametrize(
    "victims", [(0,), (3,), (0, 1), (0, 2)], ids=["first", "last", "a-host", "each-others-buddies"]
)
def test_ranks_die(trains, victims):
    """The others go on with at most one step less; the replacements join; the weights are as if no rank had died."""
    training = trains()
    kill(training, *victims)
    training.wait_for_world(4)
    finish(training)
    assert max(lost_steps(training).values()) <= 1


def test_a_host_leaves_and_comes_back_by_plan(trains):
    """Its ranks hand over what only they hold: no step is lost, also with copies at every 50th commit only."""
    training = trains(every=50)
    training.cluster.remove_host("127.0.0.2")
    training.wait_for_world(2)
    training.cluster.add_host("127.0.0.2:2")
    training.wait_for_world(4)
    finish(training)
    assert set(lost_steps(training).values()) == {0}


def test_a_rank_dies_while_the_others_reshard(trains):
    """A second death in the middle of the recovery: the same commit is still whole."""
    training = trains()
    (training.folder / "die-in-refill").write_text("1")
    kill(training, 0)
    until(lambda: not (training.folder / "die-in-refill").exists())
    training.wait_for_world(4)
    finish(training)


@pytest.mark.soak(share=0.2)
def test_copies_at_every_fourth_commit(trains):
    """A death costs at most the steps since the last whole commit."""
    training = trains(every=4)
    wait_for_steps(training, 10)
    kill(training, 2)
    training.wait_for_world(4)
    finish(training)
    assert max(lost_steps(training).values()) <= 7


@pytest.mark.soak(share=0.2)
def test_the_status_shows_copies_and_the_event_log_their_use(trains):
    """The newest whole commit grows, each copy is on the other host, and the event names the worker whose copy was used."""
    training = trains(pause=0.1)
    cluster = training.cluster
    until(lambda: (copies := cluster.status().copies) and (copies.commit or 0) >= 2 and copies.workers == 4)
    status = cluster.status()
    assert 0 <= status.time - status.copies.made_at < 10
    assert status.copies.memory == sum(worker.copies.memory for worker in status.workers) > 0
    hosts = {"localhost": "127.0.0.2", "127.0.0.2": "localhost"}
    for worker in status.workers:
        assert [on.partition("/")[0] for on in worker.copies.copied_to] == [hosts[worker.host]]
        assert worker.copies.keeps == worker.copies.copied_to  # two ranks keep each other's
    victim, earlier = by_rank(cluster)[2], len(cluster.events)
    kill(training, 2)
    (event,) = until(lambda: [e for e in cluster.events[earlier:] if e.kind == "state-recovered"])
    assert re.fullmatch(rf"world of 3 continues from commit \d+ \(copies of {victim.id}\)", event.text)
    training.wait_for_world(4)
    until(lambda: cluster.status().copies.workers == 4)
    assert cluster.status().copies.commit >= status.copies.commit
    finish(training)
    assert cluster.status().copies is None


def test_replicas_need_no_copies(trains):
    """HSDP over two hosts: each shard is on both, so both ranks of a host may die."""
    training = trains(shard=2)
    kill(training, 2, 3)
    training.wait_for_world(4)
    finish(training)
    assert max(lost_steps(training).values()) <= 1


def test_all_but_one_die_at_once(trains):
    """The last rank has mapped the copies of its host's other worker, which kept those of the other host."""
    training = trains()
    kill(training, 0, 1, 2)
    training.wait_for_world(4)
    finish(training)
    assert max(lost_steps(training).values()) <= 1


@pytest.mark.on_both(never=True)  # NCCL's abort leaves no rank asleep
@pytest.mark.soak(share=0.2)
def test_the_only_rank_that_is_left_hangs(trains):
    """It writes what it holds of all shards to disk, and ends; a worker of its host goes on with that."""
    training = trains()
    (training.folder / "hang").write_text("1")
    until(lambda: not (training.folder / "hang").exists())
    kill(training, 0, 2, 3)
    until(lambda: any(event.kind == "state-kept" for event in training.cluster.events))
    training.wait_for_world(4)
    finish(training)
    assert max(lost_steps(training).values()) <= 1


@pytest.mark.soak(share=0.2)
def test_both_hosts_with_a_shard_are_lost(tmp_path):
    """With two copies the last host goes on. With one the job ends: the error names the lost ranks, and what to do."""
    hosts = "localhost:1,127.0.0.2:1,127.0.0.3:1"
    with nbe.Cluster(hosts, min=1, max=3, cooldown=(0, 0), log_dir=tmp_path / "logs") as cluster:
        training = Training(cluster, tmp_path / "two-copies", sharded_training.train, copies=2)
        training.wait_for_world(3)
        wait_for_steps(training, 3)
        kill(training, 0, 1)
        training.wait_for_world(3)
        finish(training)
        until(lambda: sum(w.state == "ready" for w in cluster.workers) == 3)
        training = Training(cluster, tmp_path / "steps", sharded_training.train)
        training.wait_for_world(3)
        wait_for_steps(training, 3)
        first = by_rank(cluster)[0].host
        kill(training, 0, 1)  # rank 1 keeps the copy of rank 0, and rank 2 that of rank 1
        error = str(training.job.exception(timeout=30))
    assert f"no worker is left with the shards of rank 0 ({first}) of generation" in error
    assert "copies=2" in error
