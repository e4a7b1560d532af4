"""What an event costs does not grow with the cluster."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import TypeVar

from nbelastic.core.step import step
from nbelastic.protocol import events as ev
from tests.benchmarks.core import day
from tests.core.story import Story
from tests.core.test_script_job import Scripted

T = TypeVar("T")
GROWS = {"death", "host lost"}  # each member is aborted, and each worker's place is looked at


def counting_calls(work: Callable[[Callable[[], int]], T]) -> T:
    """Do the work. It gets a function that says how many functions were called and ended until then."""
    calls = 0

    def count(_frame, _event, _argument):
        nonlocal calls
        calls += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        return work(lambda: calls)
    finally:
        sys.setprofile(before)


def test_with_eight_times_the_workers_an_event_costs_the_same():
    """With 400 workers the core makes at most half as many function calls more per event than with 50, in each phase."""
    few, many = counting_calls(lambda calls: [day(workers, clock=calls) for workers in (50, 400)])
    growth = {
        phase: statistics.fmean(many.times[phase]) / statistics.fmean(times)
        for phase, times in few.times.items()
        if phase not in GROWS
    }
    assert len(growth) == 8
    assert max(growth.values()) <= 1.5, growth


def test_while_a_script_runs_time_passes_at_one_cost():
    """While nothing changes, a tick makes as many function calls with a script on 40 hosts as on 5."""

    def cost(hosts: int) -> int:
        story = Scripted(*[f"host{number}:1" for number in range(hosts)]).answer().run_script()
        assert len(story.assignments) == hosts

        def tick(calls: Callable[[], int]) -> int:
            before = calls()
            step(story.cluster, ev.Ticked(), story.now + 1e-4)
            return calls() - before

        return counting_calls(tick)

    assert cost(40) == cost(5)


def test_in_a_stall_an_answer_costs_the_same_in_a_large_world():
    """All members say where they are, and other events go on. Each is decided on with as many function calls with 40 as with 5."""

    def cost(workers: int) -> list[int]:
        story = Story(*[f"host{number:02}:1" for number in range(workers)], min=1).run().commit(3).answer()
        generation = story.cluster.generation
        story.send(ev.StallDetected(generation, 3.0))
        assert story.cluster.stall is not None
        first = story.cluster.members[0]
        events = (
            ev.Ticked(),
            ev.PositionReported(first, generation, 3, 4, True, ""),
            ev.StoreOffered(first, generation, ""),
        )

        def decide(calls: Callable[[], int]) -> list[int]:
            found = []
            for event in events:
                before = calls()
                step(story.cluster, event, story.now + 1e-4)
                found.append(calls() - before)
            return found

        return counting_calls(decide)

    assert cost(40) == cost(5)
