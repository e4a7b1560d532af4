"""A sharded training under random faults and changes of its world."""

from __future__ import annotations

import os
import signal

import pytest

import nbelastic as nbe
from tests.process import sharded_training
from tests.process.training import Training, by_rank
from tests.support import soak
from tests.support.nccl_double import CLUSTERS
from tests.support.waiting import until

FAULTS = 50  # in each of two tests, with -m soak


@pytest.mark.soak(seconds=30)
@pytest.mark.timeout(900)
@pytest.mark.on_both
@pytest.mark.parametrize("every", [1, 4])
def test_random_faults_change_no_weight(tmp_path, backend, every):
    """Kills, hosts that leave and hosts that come, from 2 to 5 ranks: the weights are those of an undisturbed training.

    Each step's global batch is fixed, so each sample was used once per epoch.
    """
    chance, faults = soak.chances("sharded", every), soak.repetitions(FAULTS)
    kills, changes, in_a_row = 0, 0, 0
    options = {"cooldown": (0, 0), "log_dir": tmp_path / "logs", **CLUSTERS[backend]}
    with nbe.Cluster("localhost:3,127.0.0.2:2", min=1, max=5, **options) as cluster:
        training = Training(cluster, tmp_path / "steps", sharded_training.train, every=every)
        training.wait_for_world(5)
        while kills < faults or not changes:
            if not in_a_row and chance.random() < 0.2:
                cluster.remove_host("127.0.0.2")
                training.wait_for_world(3)
                cluster.add_host("127.0.0.2:2")
                changes += 1
            else:
                victim = chance.choice(by_rank(cluster) or [None])
                if victim is not None:
                    os.kill(victim.pid, signal.SIGKILL)
                    until(lambda lost=victim.id: all(w.id != lost for w in cluster.workers))
                    kills, in_a_row = kills + 1, in_a_row + 1
            if in_a_row == 2 or chance.random() < 0.7:  # a third kill might hit the last rank
                training.wait_for_world(5)
                in_a_row = 0
        (training.folder / "finish").touch()
        results = training.job.result(timeout=60)
    assert len({result["step"] for result in results}) == 1
    assert sharded_training.difference(results[:1]) < 1e-9
