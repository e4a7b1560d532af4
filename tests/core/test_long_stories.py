"""Hosts, workers, users, networks, programs and drivers act as a seed says; the invariants hold, and in the end a world trains."""

from __future__ import annotations

import pytest

from tests.core.long_play import LongPlay
from tests.core.long_story import LongStory
from tests.support.soak import chances

EVENTS = 40


@pytest.mark.parametrize("seed", range(60))
def test_a_long_story(seed):
    """The same sixty stories in each run: their decisions are recorded."""
    LongStory(seed).play(EVENTS)


@pytest.mark.parametrize("seed", range(60))
def test_a_long_play(seed):
    """The same for a script."""
    LongPlay(seed).act(EVENTS)


@pytest.mark.soak(seconds=60)
def test_many_long_stories():
    """Others in each run."""
    chance = chances("long stories")
    for _ in range(800):
        seed = chance.randrange(1_000_000_000)
        try:
            LongStory(seed).play(EVENTS)
            LongPlay(seed).act(EVENTS)
        except Exception as error:
            raise AssertionError(f"the story of seed {seed} fails") from error
