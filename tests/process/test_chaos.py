"""Random faults during a training: a short version of `python -m tests.benchmarks.chaos`."""

from __future__ import annotations

import pytest

from tests.benchmarks import chaos, chaos_program, chaos_stream
from tests.support import soak
from tests.support.nccl_double import CLUSTERS


@pytest.mark.soak(seconds=30)
@pytest.mark.parametrize(("backend", "drivers"), [("gloo", False), ("gloo", True), ("nccl", False)])
def test_random_faults_lose_nothing(backend, drivers):
    """After fifteen random faults, each sample was used once per epoch, and ranks and losses are as without faults.

    Faults are kills, stops, joins and removals; with `drivers`, also kills of the driver, even while it takes over.
    """
    found = chaos.run(faults=15, seed=1, pause=0.5, drivers=drivers, **CLUSTERS[backend])
    assert found["faults"] == 15
    assert chaos.problems(found, chaos_program.alone(found["epochs"])) == []


@pytest.mark.soak(seconds=30)
@pytest.mark.timeout(300)
def test_a_stream_loses_and_repeats_nothing():
    """After many random faults each sample of uneven shards was used once per epoch, and each step is in the log once."""
    faults = soak.repetitions(100)
    found = chaos.run(faults=faults, seed=18, pause=0.7, train=chaos_stream.train)
    assert found["faults"] == faults
    assert chaos.problems(found) == []
