"""Random faults in mid-training, a short version of `python -m tests.benchmarks.chaos`."""

from __future__ import annotations

import pytest

from tests.benchmarks import chaos, chaos_program


@pytest.mark.soak
def test_nothing_is_lost_whatever_happens():
    """Fifteen kills, stops, joins and removals: every sample is used once an epoch, ranks and losses are as if undisturbed."""
    found = chaos.run(faults=15, seed=1, pause=0.5)
    assert found["faults"] == 15
    assert chaos.problems(found, chaos_program.alone(found["epochs"])) == []
