"""Hosts, workers, users, networks, programs and drivers act as a seed says: the invariants hold, and in the end all train that can."""

from __future__ import annotations

import pytest

from tests.core.long_play import LongPlay
from tests.core.long_story import LongStory
from tests.support.soak import chances

EVENTS = 40
# Of 400 stories these 43 reach all code that any of them reaches; of 1500 plays these five and the first 20.
STORIES = [
    7, 9, 34, 36, 42, 46, 50, 63, 65, 71, 82, 84, 91, 102, 106, 107, 115, 122, 131, 136, 140, 148, 151, 153, 163, 171, 178, 190,
    200, 210, 246, 248, 256, 258, 277, 321, 326, 333, 335, 345, 350, 370, 380,
]  # fmt: skip
PLAYS = (112, 119, 267, 354, 444)


@pytest.mark.parametrize("seed", STORIES)
def test_a_long_story(seed):
    """The same stories in each run: their decisions are recorded."""
    LongStory(seed).play(EVENTS)


@pytest.mark.parametrize("seed", [*PLAYS, *range(20)])
def test_a_long_play(seed):
    """The same for a script."""
    LongPlay(seed).act(EVENTS)


@pytest.mark.soak(seconds=30)
@pytest.mark.timeout(600)
def test_many_long_stories():
    """Others in each run."""
    chance = chances("long stories")
    for _ in range(400):
        seed = chance.randrange(1_000_000_000)
        try:
            LongStory(seed).play(EVENTS)
            LongPlay(seed).act(EVENTS)
        except Exception as error:
            raise AssertionError(f"the story of seed {seed} fails") from error
