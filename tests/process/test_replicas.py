"""Ranks that hold other values than the others, and slow ranks, are named while they train."""

import re

import pytest

from tests.process import replica_programs
from tests.process.training import Training, by_rank
from tests.support.waiting import until

HOSTS = "localhost:1,127.0.0.2:1,127.0.0.3:1"


@pytest.mark.soak(share=0.2)
def test_a_flipped_bit_names_the_rank_and_its_host_is_left_out(make, tmp_path):
    """Within two commits. The other ranks go on without it, and a new worker gets their values.

    In another job, where each rank trains for itself, one event says that they differ, and no host is left out.
    """
    alike = {"OMP_NUM_THREADS": "1"}  # else the driver's machine has a number of its own
    cluster = make(HOSTS, min=2, exclude_differing=True, env=alike)
    training = Training(cluster, tmp_path / "steps", replica_programs.train_and_flip)
    victim = training.wait_for_world(3)[2]
    began = len(training.lines())
    until(lambda: len(training.lines()) > began + 30, what="steps that all ranks have reported")
    assert not training.events("replica-differs")
    (training.folder / "flip").touch()
    (event,) = until(lambda: training.events("replica-differs"), what="the rank to be named")
    assert (event.worker, event.host) == (victim.id, victim.host)
    (flip,) = training.lines("flipped")
    commit = int(re.search(r"since commit (\d+)", event.text)[1])
    assert flip["flipped"] < commit <= flip["flipped"] + 2
    (lost,) = until(lambda: training.events("host-lost"), what="the host to be left out")
    assert (lost.host, "has other values" in lost.text) == (victim.host, True)
    members = training.wait_for_world(3)
    assert victim.pid not in {member.pid for member in members}
    (training.folder / "finish").touch()
    results = training.job.result(timeout=30)
    assert len({result["sum"] for result in results}) == 1
    assert len(training.events("replica-differs")) == len(training.events("world-broken")) == 1

    alone = Training(cluster, tmp_path / "alone", replica_programs.train_alone)
    (event,) = until(lambda: alone.events("replicas-differ"), what="the difference to be reported")
    assert "none can be named" in event.text
    commits = cluster.status().step
    until(lambda: cluster.status().step > commits + 10, what="further commits")
    (alone.folder / "finish").touch()
    alone.job.result(timeout=30)
    assert len(alone.events("replicas-differ")) == 1
    assert not alone.events("replica-differs") + alone.events("world-broken")


@pytest.mark.soak(seconds=20)
def test_a_slow_rank_is_named_with_its_line(make, tmp_path):
    """All ranks have equally long steps, as they wait for it. When it is fast again, the status no longer says so."""
    cluster = make("localhost:3", min=3)
    training = Training(cluster, tmp_path / "slow", replica_programs.train_slowly)
    (event,) = until(lambda: training.events("rank-slow"), timeout=40, what="the slow rank to be named")
    assert (event.worker, "its data loader" in event.text) == (by_rank(cluster)[1].id, True), event.text
    assert "times as slow as the others" in event.text
    assert "times as slow" in by_rank(cluster)[1].reason
    fast, slow, _ = cluster.step_times().ranks
    assert (slow.rank, slow.worker, slow.text) == (1, event.worker, by_rank(cluster)[1].reason)
    assert max(filter(None, slow.times)) > 2 * max(filter(None, fast.times))
    (training.folder / "fast").touch()
    until(lambda: not any(worker.reason for worker in cluster.workers), what="the rank to be fast again")
    (training.folder / "finish").touch()
    training.job.result(timeout=30)
    assert len(training.events("rank-slow")) == 1
