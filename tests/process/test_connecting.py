"""A member is lost while NCCL connects: no abort reaches the others there."""

from __future__ import annotations

import pytest

from tests.support.nccl_double import CLUSTERS
from tests.support.waiting import until


@pytest.mark.soak
def test_a_newcomer_that_dies_before_its_first_connection_costs_no_other_process(trains, tmp_path):
    """NCCL on the others waits for it until torch gives up. Then they train on, as the same processes."""
    die, options = tmp_path / "die", CLUSTERS["nccl"]
    options = {
        "backend": "nccl",
        "preload": ["tests.process.dying_in_connect"],
        "env": {**options["env"], "TORCH_NCCL_NONBLOCKING_TIMEOUT": "2", "DIE": str(die)},
    }
    training = trains("localhost:3", min=3, max=3, **options)
    first, lost, last = training.wait_for_world(3)
    die.touch()
    training.signal_worker(lost)
    until(lambda: not die.exists() or training.job.done(), 30)
    now = {worker.pid for worker in training.wait_for_world(3)}
    assert {first.pid, last.pid} <= now
    training.finish()
