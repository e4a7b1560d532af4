"""The formation that all members receive, and the ranks that each member computes from it."""

from __future__ import annotations

import pytest

from nbelastic.protocol import worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.rank_layout import ranges, rank_numbers
from nbelastic.worker.formation import Formation, formation_of

FORMATION = worker_messages.Formation(7, (("b", (0, 3)), ("a", (1,))), "10.0.0.1:4711", 1, ((0, 1), (2, 3)))


def test_each_member_finds_its_ranks():
    """The six numbers of torchrun's contract, equal to the driver's."""
    members = [WorkerId("b", 0, 4), WorkerId("b", 3, 1), WorkerId("a", 1, 9)]
    for w, place in zip(members, rank_numbers(members), strict=True):
        numbers = (place.rank, 3, place.local_rank, place.local_size, place.cross_rank, place.cross_size)
        assert formation_of(FORMATION, w) == Formation(
            7, *numbers, "10.0.0.1:4711", 1, receivers=(0, 2), hosts=(("b", 2), ("a", 1))
        )


def test_a_worker_that_is_not_a_member_has_no_rank():
    """A worker that received the formation by mistake raises."""
    with pytest.raises(ValueError, match="not in list"):
        formation_of(FORMATION, WorkerId("a", 0, 1))


@pytest.mark.parametrize(
    ("numbers", "found"),
    [((), ()), ((3,), ((3, 4),)), ((0, 1, 2, 5), ((0, 3), (5, 6))), (tuple(range(1, 10_000)), ((1, 10_000),))],
)
def test_ranks_as_ranges(numbers, found):
    """All ranks but the root are one range or two, however many there are."""
    assert ranges(numbers) == found
    assert tuple(n for first, end in found for n in range(first, end)) == numbers
