"""Random faults in mid-training, a short version of `python -m tests.benchmarks.chaos`."""

from __future__ import annotations

import pytest

from tests.benchmarks import chaos, chaos_program


@pytest.mark.soak
@pytest.mark.parametrize("drivers", [False, True])
def test_nothing_is_lost_whatever_happens(drivers):
    """Fifteen kills, stops, joins and removals: every sample is used once an epoch, ranks and losses are as if undisturbed.

    The cluster's driver is killed among them, also while it takes over.
    """
    found = chaos.run(faults=15, seed=1, pause=0.5, drivers=drivers)
    assert found["faults"] == 15
    assert chaos.problems(found, chaos_program.alone(found["epochs"])) == []
