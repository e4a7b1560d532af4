"""Ranks' hashes are compared: the rank that differs from most is named, once, and no other rank."""

import pytest

from nbelastic.driver.replicas import AllDiffer, Differs, Replicas
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.rank_reports import ReplicaHashes

A, B, C, D = (WorkerId(host, 0, 1) for host in "abcd")


class Ranks:
    """Workers that report hashes; `found` is what the comparison has returned."""

    def __init__(self, *workers):
        self.workers, self.replicas, self.found = workers, Replicas(), []

    def report(self, worker, commits, value=7, *, generation=1, kind=5, whole_at=1):
        by_commit = dict.fromkeys(commits, value) if not isinstance(commits, dict) else commits
        hashes = ReplicaHashes(generation, kind, whole_at, by_commit)
        self.found += self.replicas.add(worker, len(self.workers), hashes)

    def all_report(self, commits, **bad):
        for worker in self.workers:
            self.report(worker, commits, bad.get(worker.host, 7))


def test_the_rank_that_differs_is_named_with_the_commit():
    """Three equal ranks, then one has another value: it is named at the first commit that all have reported."""
    ranks = Ranks(A, B, C)
    ranks.all_report([1, 2])
    assert ranks.found == []
    ranks.all_report([3, 4], b=8)
    assert ranks.found == [Differs((B,), 3, were_equal=True)]
    assert ranks.replicas.differing == {B: 3}


def test_a_rank_is_named_once_in_each_generation():
    """Its later hashes differ too, as each continues the one before it."""
    ranks = Ranks(A, B, C)
    for commit in range(1, 50):
        ranks.all_report([commit], c=8)
    assert ranks.found == [Differs((C,), 1, were_equal=False)]
    for worker, value in ((A, 7), (B, 7), (C, 8)):
        ranks.report(worker, [60], value, generation=2)
    assert ranks.found[1:] == [Differs((C,), 60, were_equal=False)]


def test_a_second_rank_that_differs_is_named_too():
    """The first one has other values already."""
    ranks = Ranks(A, B, C, D)
    ranks.all_report([1])
    ranks.all_report([2], a=8)
    ranks.all_report([3], a=8)
    ranks.all_report([4], a=8, d=9)
    assert ranks.found == [Differs((A,), 2, were_equal=True), Differs((D,), 4, were_equal=True)]


def test_of_two_ranks_none_can_be_named():
    """Two that differ, and ranks that train each alone, are reported once in a job."""
    two = Ranks(A, B)
    for commit in range(1, 20):
        two.all_report([commit], b=8)
    assert two.found == [AllDiffer(1)]
    for worker, value in ((A, 1), (B, 2)):
        two.report(worker, [30], value, generation=2)
    assert two.found == [AllDiffer(1)]
    alone = Ranks(A, B, C)
    alone.all_report([1], b=8, c=9)
    alone.all_report([2], b=8, c=9)
    assert alone.found == [AllDiffer(1)]
    assert alone.replicas.differing == {}


def test_two_pairs_name_none():
    """Half of the ranks are not most of them."""
    ranks = Ranks(A, B, C, D)
    ranks.all_report([1], a=8, b=8)
    assert ranks.found == [AllDiffer(1)]


@pytest.mark.parametrize("order", [(A, B, C), (C, B, A), (B, A, C)])
def test_the_order_of_reports_does_not_matter(order):
    """No rank is named before a majority has reported."""
    ranks = Ranks(A, B, C)
    for worker in order:
        ranks.report(worker, [1], 8 if worker == B else 7)
    assert ranks.found == [Differs((B,), 1, were_equal=False)]


def test_a_lost_report_delays_the_comparison_only():
    """Telemetry may be lost: the next commit that most have reported counts."""
    ranks = Ranks(A, B, C)
    ranks.report(A, [1, 2])
    ranks.report(B, [3, 4], 8)
    ranks.report(C, [5])
    assert ranks.found == []
    ranks.all_report([6], b=8)
    assert ranks.found == [Differs((B,), 6, were_equal=False)]


def test_ranks_of_another_kind_are_compared_among_themselves():
    """Other hardware computes other bits: three of one kind and two of another are equal in themselves."""
    workers = [WorkerId(f"h{number}", 0, 1) for number in range(5)]
    ranks = Ranks(*workers)
    for number, worker in enumerate(workers):
        ranks.report(worker, [1], 7 if number < 3 else 8, kind=1 if number < 3 else 2)
    assert ranks.found == []
    for number, worker in enumerate(workers):
        ranks.report(worker, [2], 9 if number == 2 else 7 if number < 3 else 8, kind=1 if number < 3 else 2)
    assert [found.workers for found in ranks.found] == [(workers[2],)]


def test_nothing_is_judged_before_all_kinds_are_known():
    """A member without a report may be of any kind."""
    ranks = Ranks(A, B, C)
    ranks.report(A, [1], 7)
    ranks.report(B, [1], 8)
    assert ranks.found == []
    ranks.report(C, [1], 7, kind=6)
    ranks.report(A, [2], 7)
    ranks.report(B, [2], 8)
    assert ranks.found == [AllDiffer(2)]


def test_values_count_as_equal_after_all_windows_were_read():
    """Before, a difference may be as old as the generation."""
    for whole_at, were_equal in ((2, True), (3, False)):
        ranks = Ranks(A, B, C)
        for commit, bad in ((1, 7), (2, 7), (3, 8)):
            for worker in (A, B, C):
                ranks.report(worker, [commit], bad if worker == C else 7, whole_at=whole_at)
        assert ranks.found == [Differs((C,), 3, were_equal=were_equal)]


def test_an_earlier_generation_is_not_compared():
    """Late reports are dropped, and a new generation begins from nothing."""
    ranks = Ranks(A, B, C)
    ranks.all_report([1])
    ranks.report(A, [2], generation=2)
    ranks.report(B, [2], 8, generation=1)
    ranks.report(C, [2], 9, generation=1)
    ranks.report(B, [2], generation=2)
    ranks.report(C, [2], generation=2)
    assert ranks.found == []


def test_memory_is_bounded():
    """Commits that a member never reports are forgotten."""
    ranks = Ranks(A, B, C)
    for commit in range(10_000):
        ranks.report(A, [commit])
        ranks.report(B, [commit])
    assert len(ranks.replicas._hashes) <= 64


def test_the_others_are_compared_after_a_rank_was_named():
    """Their commits are complete without it, so no memory is kept for them."""
    ranks = Ranks(A, B, C, D)
    ranks.all_report([1], d=8)
    ranks.all_report([2, 3], d=8)
    assert not any(ranks.replicas._hashes.values())
