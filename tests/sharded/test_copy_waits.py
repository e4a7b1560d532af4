"""What a training that waits for its copies is advised."""

from __future__ import annotations

from nbelastic.sharded.copy_waits import CopyWaits
from nbelastic.sharded.replication import Whole
from nbelastic.sharded.whole_commits import Commit


def whole(number, made_at, seconds, *, is_first=False):
    return Whole(Commit(1, number), made_at, seconds, is_first)


def lines(*waits, is_first=False):
    """The lines for commits 2, 4, … that are 1 s of training apart, each given the time that it waits."""
    watch, now, found = CopyWaits(2), 0.0, []
    for number, wait in enumerate(waits, 1):
        begun, ended = now + 1.0, now + 1.0 + wait
        found.append(watch.note(2 * number, whole(2 * number - 2, now, 1.0 + wait, is_first=is_first), begun, ended))
        now = ended
    return found


def test_the_line_says_which_interval_is_long_enough():
    """Copies take 2.5 s and two commits 1 s: only after five commits is the copying done."""
    (line,) = filter(None, lines(1.5, 1.5, 1.5, 1.5))
    assert line == (
        "commit 6 waited 1.50 s for the copies of commit 4, 60% of the time since it. Copying takes 2.50 s and "
        "every=2: use ShardedState(every=5) or more, so that the training does not wait."
    )


def test_short_and_single_waits_are_no_reason():
    """Nothing is said about waits below a tenth of the time, or about a wait now and then."""
    assert not any(lines(0.1, 0.1, 0.1, 0.1, 0.1))
    assert not any(lines(1.5, 1.5, 0.0, 1.5, 1.5, 0.0))


def test_waits_of_milliseconds_are_no_reason():
    """Steps of a very small model take a millisecond, and copying as long: no line advises to change that."""
    watch = CopyWaits(1)
    assert not any(
        watch.note(n, whole(n - 1, n * 0.002, 0.001), n * 0.002 + 0.001, n * 0.002 + 0.002) for n in range(9)
    )


def test_copies_that_needed_new_memory_do_not_count():
    """A generation's first copies allocate memory, which takes longer than copying."""
    assert not any(lines(1.5, 1.5, 1.5, 1.5, is_first=True))
