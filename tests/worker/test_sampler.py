"""Every sample of an epoch is used once, however the world changes on the way."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from nbelastic import ElasticSampler
from tests.worker.conftest import formation

SIZES = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 9)), min_size=1, max_size=8)


class Ranks:
    """The ranks of a world that train in step, each with its own sampler."""

    def __init__(self, monkeypatch, count, size, state, **options):
        self.monkeypatch, self.size = monkeypatch, size
        self.samplers = [ElasticSampler(range(count), **options) for _ in range(size)]
        for sampler in self.samplers:
            sampler.load_state_dict(state)

    def each(self, call):
        found = []
        for rank, sampler in enumerate(self.samplers):
            self.monkeypatch.setattr("nbelastic.worker.session.world", lambda rank=rank: formation(rank, self.size))
            found.append(call(sampler))
        return found

    def steps(self, most, batch):
        """Up to `most` steps: what each rank used in them."""
        shares = self.each(list)
        assert len({len(share) for share in shares}) == 1
        assert self.each(len) == [len(share) for share in shares]
        used = []
        for start in range(0, min(most * batch, len(shares[0])), batch):
            for share in shares:
                used += share[start : start + batch]
            self.each(lambda sampler: sampler.record_batch(batch))
        states = self.each(lambda sampler: sampler.state_dict())
        assert all(state == states[0] for state in states)
        return used, states[0]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(0, 200), batch=st.integers(1, 9), worlds=SIZES, shuffle=st.booleans())
def test_each_sample_once_through_any_worlds(count, batch, worlds, shuffle):
    """Whatever worlds follow one another: all samples are used, and only at the very end some a second time."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        state, used = {"epoch": 0, "used": 0}, []
        for size, most in [*worlds, (worlds[-1][0], 10_000)]:
            part, state = Ranks(monkeypatch, count, size, state, shuffle=shuffle, seed=5).steps(most, batch)
            used += part
        assert set(used) == set(range(count))
        assert len(used) - count < max(size for size, _ in worlds)
        assert state["used"] == count


def test_the_order_is_another_one_each_epoch_and_the_same_everywhere():
    """Shuffled by seed and epoch: ranks agree, epochs differ."""
    one, two, other = ElasticSampler(range(100)), ElasticSampler(range(100)), ElasticSampler(range(100), seed=1)
    assert list(one) == list(two) != list(other)
    first = list(one)
    one.set_epoch(1)
    assert sorted(first) == sorted(one) == list(range(100))
    assert list(one) != first


def test_without_shuffling_the_order_is_that_of_the_data(stand):
    """`shuffle=False`: the samples go round the ranks in turn."""
    sampler = ElasticSampler(range(7), shuffle=False)
    stand(1, 3)
    assert list(sampler) == [1, 4, 0]
    sampler.record_batch(1)
    assert list(sampler) == [4, 3]
    assert len(sampler) == 2


def test_the_padding_is_spread_over_few_samples(stand):
    """With fewer samples left than ranks, everybody still gets one."""
    sampler = ElasticSampler(range(2), shuffle=False)
    shares = []
    for rank in range(5):
        stand(rank, 5)
        shares.append(list(sampler))
    assert shares == [[0], [1], [0], [1], [0]]


def test_an_epoch_begins_once(stand):
    """A function that starts again from its top says the same epoch again: what was used stays used."""
    stand(0, 2)
    sampler = ElasticSampler(range(10))
    sampler.set_epoch(3)
    sampler.record_batch(2)
    sampler.set_epoch(3)
    assert sampler.state_dict() == {"epoch": 3, "used": 4}
    sampler.set_epoch(4)
    assert sampler.state_dict() == {"epoch": 4, "used": 0}


def test_nothing_is_left_at_the_end(stand):
    """After the last sample an iteration is empty, and more than all is not counted."""
    stand(0, 3)
    sampler = ElasticSampler(range(4))
    sampler.record_batch(100)
    assert (list(sampler), len(sampler), sampler.used) == ([], 0, 4)


def test_outside_a_world_all_samples_are_mine():
    """A notebook can try the same loop alone."""
    assert sorted(ElasticSampler(range(5))) == [0, 1, 2, 3, 4]
    assert len(ElasticSampler([])) == 0
    assert list(ElasticSampler([])) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_what_was_fetched_ahead_does_not_count(stand, workers):
    """A DataLoader that prefetches runs ahead of the training; only what was recorded is used."""
    stand(0, 2)
    data = torch.arange(40)
    sampler = ElasticSampler(data, shuffle=False)
    options = {"num_workers": workers, "prefetch_factor": 4} if workers else {}
    batches = iter(DataLoader(data, batch_size=4, sampler=sampler, **options))
    assert next(batches).tolist() == [0, 2, 4, 6]
    sampler.record_batch(4)
    next(batches)  # fetched, never trained on
    del batches
    stand(0, 1)
    assert next(iter(sampler)) == 8
