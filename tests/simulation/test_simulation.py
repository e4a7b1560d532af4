"""Whole clusters in virtual time, with faults at random moments: nothing is lost or done twice, and in the end a world trains."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.simulation.faults import as_line, draw, parsed, play, shrink
from tests.simulation.planted import PLANTED
from tests.support import soak

REGRESSIONS = Path(__file__).with_name("regressions").read_text().splitlines()
SEEDS = 20  # of ten simulated minutes each
BUDGET = 60.0  # seconds of a soak test
MOST = 60  # seeds in which a planted fault must show


def fails(seed, schedule):
    """The error of this schedule; None if there is none."""
    try:
        play(seed, schedule)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def check(seed):
    """Play the schedule of this seed. The error has the shortest schedule that fails, as a line for `regressions`."""
    schedule = draw(seed)
    error = fails(seed, schedule)
    if error:
        shortest = shrink(seed, schedule, lambda shorter: fails(seed, shorter) is not None)
        pytest.fail(f"seed {seed}: {error}\na line for tests/simulation/regressions:\n{as_line(seed, shortest)}")


def test_ten_minutes_of_faults():
    """A fault every 14 s on average, on eight workers of four hosts: the invariants hold, and all that can train does in the end."""
    seeds = soak.chances("ten minutes")
    for _ in range(SEEDS):
        check(seeds.randrange(10**9))


@pytest.mark.soak(seconds=BUDGET)
def test_a_minute_of_seeds():
    """As many schedules as fit into a minute."""
    seeds, end = soak.chances("a minute"), time.monotonic() + BUDGET
    while time.monotonic() < end:
        check(seeds.randrange(10**9))


def test_schedules_that_have_failed_once():
    """They were the shortest that showed a fault, which is mended."""
    assert [line for line in REGRESSIONS if fails(*parsed(line))] == []


@pytest.mark.soak(seconds=5)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    """The simulation would find it: one of the first seeds fails."""
    with PLANTED[name]():
        assert any(fails(seed, draw(seed)) for seed in range(MOST))


def test_a_seed_repeats_itself():
    """The same seed makes the same decisions at the same times."""
    one, other = play(7, draw(7)), play(7, draw(7))
    assert one.log == other.log
    assert one.events == other.events


def test_shrinking():
    """A schedule of which only two faults matter is shrunk to these two."""
    schedule = draw(3)
    needed = {schedule[2], schedule[-1]}
    assert set(shrink(3, schedule, lambda shorter: needed <= set(shorter))) == needed
