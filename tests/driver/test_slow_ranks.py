"""The rank for which all others wait is named while they train, after it was slow for a while."""

from nbelastic.driver.slow_ranks import MOST_OTHERS, SlowRanks
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.rank_reports import OwnTime

A, B, C = MEMBERS = tuple(WorkerId(host, 0, 1) for host in "abc")


def report(ranks, now, generation=1, place="train.py:88 in load", **own):
    """The texts after reports of all members, by host; a step takes as long as that of the slowest."""
    step = max(own.values())
    found = {w: ranks.add(w, MEMBERS, OwnTime(generation, step, own[w.host], place), now) for w in MEMBERS}
    return {w: text for w, text in found.items() if text}


def test_a_rank_that_is_slow_for_ten_seconds_is_named_once():
    """The text has the factor, both times and the place. The status shows it until the rank is fast again."""
    ranks = SlowRanks()
    assert report(ranks, 0.0, a=40, b=41, c=124) == {}
    assert report(ranks, 5.0, a=40, b=41, c=124) == {}
    assert ranks.text(C) == ""
    text = "is 3.1 times as slow as the others (124 ms per step, they 40 ms), mostly in train.py:88 in load"
    assert report(ranks, 10.0, a=40, b=40, c=124) == report(SlowRanks(), 0.0, a=1, b=1, c=1) | {C: text}
    assert report(ranks, 15.0, a=40, b=40, c=124) == {}
    assert (ranks.text(C), ranks.since(C)) == (text, 0.0)
    report(ranks, 20.0, a=40, b=40, c=45)
    assert ranks.text(C) == ""


def test_short_and_small_differences_are_no_news():
    """Others use the machine too, and a step of a few milliseconds varies."""
    ranks = SlowRanks()
    for now in range(0, 100, 5):
        slow = 124 if now % 10 else 41
        assert report(ranks, float(now), a=40, b=41, c=slow) == {}
    for now in range(100, 200, 5):
        assert report(ranks, float(now), a=1, b=1, c=5) == {}
        assert report(ranks, float(now), a=40, b=41, c=59) == {}


def test_in_a_large_world_a_rank_is_compared_with_some():
    """A report costs no more than in a world of 65, and a slow rank is named."""
    members = tuple(WorkerId("a", slot, 1) for slot in range(5000))
    ranks = SlowRanks()
    for w in members[: MOST_OTHERS + 1]:
        ranks.add(w, members, OwnTime(1, 100.0, 40.0), 0.0)
    slow = OwnTime(1, 100.0, 90.0)
    assert [bool(ranks.add(members[-1], members, slow, now)) for now in (1.0, 11.0)] == [False, True]


def test_all_ranks_must_have_reported_in_this_generation():
    """Without recent reports of the others there is nothing to compare with."""
    ranks = SlowRanks()
    for now in (0.0, 10.0, 20.0):
        assert ranks.add(C, MEMBERS, OwnTime(1, 124, 124), now) == ""
    report(ranks, 30.0, a=40, b=40, c=124)
    assert report(ranks, 45.0, generation=2, a=40, b=40, c=124) == {}
    ranks.forget(C)
    assert ranks.text(C) == ""
