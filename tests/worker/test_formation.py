"""What all members are told, and what each makes of it."""

from __future__ import annotations

import pytest

from nbelastic.protocol import worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.rank_layout import ranges, rank_numbers
from nbelastic.worker.formation import Formation, formation_of

ORDER = worker_messages.Formation(7, (("b", (0, 3)), ("a", (1,))), "10.0.0.1:4711", 1, ((0, 1), (2, 3)))


def test_each_member_finds_its_ranks():
    """The six numbers of torchrun's contract, as the driver would count them."""
    members = [WorkerId("b", 0, 4), WorkerId("b", 3, 1), WorkerId("a", 1, 9)]
    for w, place in zip(members, rank_numbers(members), strict=True):
        numbers = (place.rank, 3, place.local_rank, place.local_size, place.cross_rank, place.cross_size)
        assert formation_of(ORDER, w) == Formation(
            7, *numbers, "10.0.0.1:4711", 1, receivers=(0, 2), hosts=(("b", 2), ("a", 1))
        )


def test_who_is_no_member_has_no_rank():
    """It was not told by mistake without a word."""
    with pytest.raises(ValueError, match="not in list"):
        formation_of(ORDER, WorkerId("a", 0, 1))


@pytest.mark.parametrize(
    ("numbers", "found"),
    [((), ()), ((3,), ((3, 4),)), ((0, 1, 2, 5), ((0, 3), (5, 6))), (tuple(range(1, 10_000)), ((1, 10_000),))],
)
def test_ranks_as_ranges(numbers, found):
    """All but the root are one range, or two, however many there are."""
    assert ranges(numbers) == found
    assert tuple(n for first, end in found for n in range(first, end)) == numbers
