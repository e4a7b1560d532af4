"""An ElasticStream and a StepLog in a training that loses a worker, gets new ones and drains a host. `test_chaos.py` has a hundred faults."""

from __future__ import annotations

import os
import signal

import pytest

from tests.benchmarks import chaos_stream
from tests.support.waiting import until


@pytest.mark.soak(share=0.2)
def test_each_sample_of_a_stream_is_used_once(make, tmp_path):
    """Through a kill, newcomers and a drain, in worlds of 1 to 4: in each epoch every sample of every shard once.
    The victim is rank 0, which writes the log: each step is in it once (`chaos_stream.train` checks that).

    The shards have different lengths, which the ranks do not know. A process of a DataLoader reads them in each rank.
    """
    cluster = make("localhost:3", min=1)
    job = cluster.run(chaos_stream.train, str(tmp_path), processes=1)

    def train_on(world):
        """Train some steps in this world."""
        cluster.wait(world, timeout=30)
        begun = cluster.status().step
        until(lambda: job.done() or cluster.status().step > begun + 15, what="steps of the training")
        assert not job.done(), job.exception()

    train_on(3)
    victim = next(w for w in cluster.workers if w.rank == 0)
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: all(w.id != victim.id for w in cluster.workers), what="the worker to be lost")
    train_on(3)
    cluster.add_host("127.0.0.2:1")
    train_on(4)
    cluster.remove_host("localhost")
    train_on(1)
    (tmp_path / "finish").touch()
    (found,) = job.result(timeout=60)
    assert found["used"] == {found["epochs"]}
    assert found["lost"] == 0
