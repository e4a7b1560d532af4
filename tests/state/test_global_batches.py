"""A global batch in parts: the samples of each step do not depend on the ranks that make it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbelastic import UsageError
from nbelastic.integrations.global_batches import GlobalBatches
from nbelastic.state import sampler
from tests.state.conftest import formation
from tests.support.soak import examples  # noqa: F401  (it loads the profile)


def parts_of(rank, size, count, batch, part, *, first=0, shuffle=True):
    """Of each step from `first` on: the samples of this rank that count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler.session, "world", lambda: formation(rank, size))
        batches = GlobalBatches(range(count), batch, part, shuffle=shuffle, seed=5, drop_last=False)
        batches.epoch, batches.skipped = 2, first * batches.parts
        given_parts = list(batches)
        assert len(given_parts) == len(batches)
        assert given_parts[: batches.skipped] == [[]] * batches.skipped
        assert max(map(len, given_parts)) <= part
        steps = []
        for number in range(batches.skipped, len(batches), batches.parts):
            sizes = batches.sizes(number // batches.parts)
            step = given_parts[number : number + batches.parts]
            assert [max(size, 1) for size in sizes] == [len(one) for one in step]
            steps.append([sample for size, one in zip(sizes, step, strict=True) for sample in one[:size]])
        return steps


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 60), st.integers(5, 20), st.integers(1, 8), st.data())
def test_each_step_has_the_same_samples_in_any_world(size, other, count, batch, part, data):
    """Also where ranks have begun in the middle of an epoch, and each sample is used once."""
    steps = -(-count // batch)
    first = data.draw(st.integers(0, steps - 1))
    mine = [parts_of(rank, size, count, batch, part) for rank in range(size)]
    later = [parts_of(rank, other, count, batch, part, first=first) for rank in range(other)]
    whole = [[sample for rank in mine for sample in rank[step]] for step in range(steps)]
    assert sorted(sample for step in whole for sample in step) == list(range(count))
    assert whole[first:] == [[sample for rank in later for sample in rank[step]] for step in range(steps - first)]


def test_an_epoch_without_a_whole_batch_is_refused(as_rank):
    """If incomplete batches are dropped, nothing would be left."""
    as_rank(0, 1)
    with pytest.raises(UsageError, match="the 7 samples are fewer than a global batch of 8"):
        GlobalBatches(range(7), 8, 8, shuffle=True, seed=0, drop_last=True)
