"""The ranks return to the newest commit of which every chunk has a holder."""

from nbelastic.protocol.worker_messages import Continued
from nbelastic.sharded.whole_commits import (
    Choice,
    Commit,
    Held,
    Lost,
    Origin,
    Statement,
    choose,
    continued,
    is_endangered,
)

FOUR = Origin(("a", "a", "b", "b"), tuple(frozenset({rank}) for rank in range(4)))


def states(generation=1, origin=FOUR, **held):
    """`r0=[(commit, shard), …]`: what each rank of the new world holds; its own shard is its number in the name."""
    return [
        Statement(
            tuple(Held(Commit(generation, commit), shard) for commit, shard in shards),
            {generation: origin},
            {generation: int(name[1:])},
            recoverable=True,
        )
        for name, shards in held.items()
    ]


def test_the_newest_commit_that_every_shard_has():
    """Rank 3 is lost: its shard of commit 8 is on rank 1, that of commit 9 nowhere."""
    choice = choose(
        states(
            r0=[(8, 0), (9, 0), (8, 2)],
            r1=[(8, 1), (9, 1), (8, 3)],
            r2=[(8, 2), (9, 2), (8, 0)],
        )
    )
    assert choice == Choice(Commit(1, 8), {0: (0, 2), 1: (1,), 2: (0, 2), 3: (1,)}, (0, 1, 2))


def test_the_event_log_gets_the_commit_and_whose_copies_are_used():
    """Rank 3 is lost, so its copy is used; without a loss no copies are named."""
    three = states(r0=[(8, 0), (8, 2)], r1=[(8, 1), (8, 3)], r2=[(8, 2), (8, 0)])
    assert continued(choose(three), three, 1) == Continued(1, 8, (3,), size=3, rank=1)
    four = [*three, *states(r3=[(8, 3)])]
    assert continued(choose(four), four, 0) == Continued(1, 8, size=4)


def test_a_pair_that_holds_each_others_copies_is_lost_together():
    """The ranks whose shards no rank holds are named, with their hosts."""
    lost = choose(states(r0=[(8, 0), (8, 2)], r2=[(8, 2), (8, 0)]))
    assert lost == Lost(Commit(1, 8), (1, 3), ("a", "b"))


def test_replicas_are_copies():
    """With two replicas, one rank of each pair is enough."""
    pairs = Origin(("a", "a", "b", "b"), (frozenset({0, 2}), frozenset({1, 3})))
    choice = choose(states(origin=pairs, r0=[(8, 0)], r3=[(8, 3)]))
    assert choice == Choice(Commit(1, 8), {0: (0,), 3: (1,)}, (0, 1))


def test_replicas_at_different_commits_return_to_the_one_that_all_chunks_have():
    """One rank made commit 9, the others did not."""
    pairs = Origin(("a", "a", "b", "b"), (frozenset({0, 2}), frozenset({1, 3})))
    choice = choose(states(origin=pairs, r0=[(8, 0), (9, 0)], r3=[(8, 3)]))
    assert choice.commit == Commit(1, 8)


def test_a_later_generation_is_newer_than_a_higher_number():
    """A generation that returned to commit 8 has the newer state, although an old shard of commit 9 is still there."""
    one = Origin(("a",), (frozenset({0}),))
    old = Statement((Held(Commit(1, 9), 0),), {1: one}, {1: 0}, recoverable=True)
    new = Statement((Held(Commit(2, 8), 0),), {2: one}, {2: 0}, recoverable=True)
    assert choose([old, new]).commit == Commit(2, 8)


def test_a_commit_counts_only_with_a_rank_that_has_its_small_values():
    """Copies of all shards are not enough: counters and schedulers are with a rank that made the commit."""
    one = Origin(("a", "a"), (frozenset({0, 1}),))
    copies_only = Statement((Held(Commit(1, 9), 0),), {1: one}, {1: 1}, recoverable=True)
    assert isinstance(choose([copies_only]), Lost)


def test_newcomers_alone_hold_nothing():
    """Without any holder the job begins anew."""
    assert choose([Statement(), Statement()]) is None


def test_the_least_damaged_commit_is_reported():
    """Of commit 9 only one copy had arrived, of commit 8 all but one shard is there."""
    lost = choose(states(r0=[(8, 0), (9, 0), (8, 2), (8, 3)]))
    assert lost == Lost(Commit(1, 8), (1,), ("a",))


def test_before_the_first_whole_commit_the_job_begins_anew():
    """A rank was lost before any commit was whole: a few steps are made again, and no work of hours is."""
    first = Statement((Held(Commit(1, 1), 0),), {1: FOUR}, {1: 0})
    assert choose([first]) is None


def test_a_newcomer_that_is_left_alone_names_the_commit_that_is_lost():
    """The others died before it had filled its shard: it knows the commit that it was to fill it from, and no shard."""
    known = (Commit(1, 8),)
    lost = choose([Statement((), {1: FOUR}, {}, recoverable=True, known=known)])
    assert lost == Lost(Commit(1, 8), (0, 1, 2, 3), ("a", "a", "b", "b"))


def test_after_a_loss_a_trial_goes_on_if_another_loss_would_lose_nothing():
    """Each part of one commit, old or new, is then on two ranks. Without a loss the ranks need no copies."""
    four = states(r0=[(8, 0)], r1=[(8, 1)], r2=[(8, 2)], r3=[(8, 3)])
    assert not is_endangered(four)
    assert is_endangered(four[:3])
    assert is_endangered(states(r0=[(8, 0), (8, 3)], r1=[(8, 1), (8, 3)], r2=[(8, 2), (8, 0)]))
    spare = states(r0=[(9, 0), (8, 0), (8, 1), (8, 2), (8, 3)], r1=[(9, 1), (8, 1), (8, 0), (8, 2), (8, 3)])
    assert not is_endangered([*spare, Statement()])


def test_a_rank_that_is_alone_has_nobody_to_copy_to():
    """And newcomers hold nothing: one of them does not make it safer."""
    (alone,) = states(r0=[(8, 0), (8, 1), (8, 2), (8, 3)])
    assert not is_endangered([alone])
    assert is_endangered([alone, Statement()])
    assert not is_endangered([Statement()])
