"""Copies are on another host if there is one, never on the rank itself, and spread evenly."""

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from nbelastic.sharded.buddies import choose_buddies, hand_over

COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def hosts_of(counts):
    return [f"host-{index}" for index, count in enumerate(counts) for _ in range(count)]


@given(COUNTS, st.integers(0, 2))
def test_the_copy_is_in_another_failure_domain(counts, copies):
    """Each rank has its copies on other ranks, and on other hosts as long as there are any."""
    hosts = hosts_of(counts)
    for rank, buddies in enumerate(choose_buddies(hosts, copies=copies)):
        assert len(buddies) == len(set(buddies)) == min(copies, len(hosts) - 1)
        assert rank not in buddies
        domains = {hosts[rank], *(hosts[buddy] for buddy in buddies)}
        assert len(domains) == min(1 + len(buddies), len(set(hosts)))


@given(COUNTS)
def test_no_rank_keeps_more_copies_than_the_hosts_require(counts):
    """The most loaded rank keeps as many as the ranks of the largest host need on the others, rounded up."""
    hosts = hosts_of(counts)
    loads = Counter(buddy for buddies in choose_buddies(hosts) for buddy in buddies)
    biggest = max(counts)
    others = len(hosts) - biggest
    needed = -(-biggest // others) if others else 1
    assert max(loads.values(), default=0) <= max(2, needed)


def test_with_equal_hosts_two_ranks_keep_each_others_copies():
    """Then only one in (size - 1) ways to lose two ranks loses a shard."""
    buddies = choose_buddies(hosts_of([2, 2]))
    assert buddies == ((2,), (3,), (0,), (1,))
    fatal = [pair for pair in combinations(range(4), 2) if buddies[pair[0]] == (pair[1],)]
    assert fatal == [(0, 2), (1, 3)]


def test_replicas_on_two_hosts_need_no_copies():
    """HSDP over hosts: each chunk is on two hosts already."""
    owners = [frozenset({0, 2}), frozenset({1, 3})]
    assert choose_buddies(hosts_of([2, 2]), owners) == ((), (), (), ())


def test_replicas_on_one_of_two_hosts_need_a_copy_on_the_other():
    """Both replicas of a chunk would end with their host, so one of them sends a copy to the other host."""
    owners = [frozenset({0, 1}), frozenset({2, 3})]
    assert choose_buddies(hosts_of([2, 2]), owners) == ((2,), (), (0,), ())


def test_leaving_ranks_hand_over_what_no_other_rank_has():
    """Rank 3 leaves with its replica on rank 1, rank 2 is the only one with its chunk."""
    owners = [frozenset({0}), frozenset({1, 3}), frozenset({2})]
    assert hand_over(owners, {2, 3}, 4) == {2: 0}


@given(st.integers(1, 8), st.sets(st.integers(0, 7)))
def test_hand_over_reaches_staying_ranks_evenly(size, leaving):
    """Each leaving rank of plain FSDP sends to one that stays; none if none stays."""
    leaving = {rank for rank in leaving if rank < size}
    plan = hand_over([frozenset({rank}) for rank in range(size)], leaving, size)
    assert set(plan) == (leaving if len(leaving) < size else set())
    assert not leaving.intersection(plan.values())
    counts = Counter(plan.values())
    assert not counts or max(counts.values()) - min(counts.get(r, 0) for r in range(size) if r not in leaving) <= 1
