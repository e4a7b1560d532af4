"""What an event costs does not grow with the cluster."""

from __future__ import annotations

import statistics
import sys

from tests.benchmarks.core import day

GROWS = {"death", "host lost"}  # each member is aborted, and each worker's place is looked at


def test_with_eight_times_the_workers_an_event_costs_the_same():
    """With 400 workers the core makes at most half as many function calls more per event than with 50, in each phase."""
    calls = 0

    def count(_frame, _event, _argument):
        nonlocal calls
        calls += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        few, many = (day(workers, clock=lambda: calls) for workers in (50, 400))
    finally:
        sys.setprofile(before)
    growth = {
        phase: statistics.fmean(many.times[phase]) / statistics.fmean(times)
        for phase, times in few.times.items()
        if phase not in GROWS
    }
    assert len(growth) == 8
    assert max(growth.values()) <= 1.5, growth
