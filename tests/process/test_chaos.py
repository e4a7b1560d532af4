"""Random faults in mid-training, a short version of `python -m tests.benchmarks.chaos`."""

from __future__ import annotations

from tests.benchmarks.chaos import run


def test_nothing_is_lost_whatever_happens():
    """Fifteen kills, stops, joins and removals: every sample of every epoch is used once, all ranks hold the same weights."""
    found = run(faults=15, seed=1, pause=0.6)
    assert found["faults"] == 15
    assert found["every sample once"]
    assert found["same weights"]
