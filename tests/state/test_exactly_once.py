"""Each sample of an epoch is used once, however the world changes meanwhile, and all used samples have the same weight."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from nbelastic import ElasticSampler, local_batch_size
from tests.state.conftest import formation
from tests.support.soak import examples

WORLDS = st.lists(
    st.tuples(
        st.integers(1, 7),  # ranks
        st.integers(0, 9),  # steps that are committed
        st.integers(0, 3),  # steps that were made after the last commit, when a rank was killed; 0: a planned change
    ),
    min_size=1,
    max_size=8,
)
MANY = settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])


class Ranks:
    """The ranks of a world that train in step, each with its own sampler, which continue from a state."""

    def __init__(self, monkeypatch, samplers, state):
        self.monkeypatch, self.samplers, self.size = monkeypatch, samplers, len(samplers)
        for sampler in samplers:
            sampler.load_state_dict(state)

    def each(self, call, *arguments):
        """Call `call(sampler, …)` as each rank, with that rank's item of each list of arguments."""
        found = []
        for rank, given_to in enumerate(zip(self.samplers, *arguments, strict=True)):
            self.monkeypatch.setattr("nbelastic.worker.session.world", lambda rank=rank: formation(rank, self.size))
            found.append(call(*given_to))
        return found

    def steps(self, batch):
        """Each step: a list of (sample, weight) by rank, and the state that a commit after it would hold."""
        batches = self.each(lambda sampler: _in_batches(sampler, batch))
        for step in zip(*batches, strict=True):  # a rank with fewer batches would keep the others waiting
            weights = self.each(lambda sampler, mine: sampler.weight(len(mine)) / len(mine), step)
            self.each(lambda sampler, mine: sampler.record_batch(len(mine)), step)
            states = self.each(ElasticSampler.state_dict)
            assert all(state == states[0] for state in states)
            yield [[(sample, w) for sample in mine] for mine, w in zip(step, weights, strict=True)], states[0]


def _in_batches(sampler, batch):
    size = batch if sampler.global_batch is None else local_batch_size(sampler.global_batch)
    mine = list(sampler)
    assert len(sampler) == len(mine)
    return [mine[start : start + size] for start in range(0, len(mine), size)]


def story(monkeypatch, worlds, batch, count, **options):
    """The committed steps of an epoch, through all of these worlds, and then to the end in the last one's size."""
    done = []
    state = {"epoch": 0, "used": 0}
    for size, committed, in_vain in [*worlds, (worlds[-1][0], 10_000, 0)]:
        samplers = [ElasticSampler(range(count), seed=5, **options) for _ in range(size)]
        steps = Ranks(monkeypatch, samplers, state).steps(batch)
        for _ in range(committed):
            step, state = next(steps, (None, state))
            if step is not None:
                done.append((size, step))
        for _ in range(in_vain):  # trained on, never committed
            next(steps, None)
    return done, state


def used_in(step):
    return [sample for share in step for sample, weight in share if weight]


@MANY
@given(
    count=st.integers(0, 200), batch=st.integers(1, 9), worlds=WORLDS, shuffle=st.booleans(), drop_last=st.booleans()
)
def test_each_sample_once_through_any_worlds(count, batch, worlds, shuffle, drop_last):
    """Through any changes all samples are used; only at the end few are repeated, or left out with `drop_last`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        done, state = story(monkeypatch, worlds, batch, count, shuffle=shuffle, drop_last=drop_last)
    used = [sample for _, step in done for sample in used_in(step)]
    most = max(size for size, _, _ in worlds)
    if drop_last:
        assert len(set(used)) == len(used) == state["used"] > count - most
    else:
        assert set(used) == set(range(count))
        assert len(used) - count < most
        assert state["used"] == count


@MANY
@given(
    count=st.integers(0, 200), batch=st.integers(7, 40), worlds=WORLDS, shuffle=st.booleans(), drop_last=st.booleans()
)
def test_the_same_global_batches_through_any_worlds(count, batch, worlds, shuffle, drop_last):
    """With `global_batch`, step k has the same samples in any world, and no sample counts twice."""
    options = {"shuffle": shuffle, "drop_last": drop_last, "global_batch": batch}
    with pytest.MonkeyPatch.context() as monkeypatch:
        done, state = story(monkeypatch, worlds, batch, count, **options)
    order = list(ElasticSampler(range(count), seed=5, shuffle=shuffle))
    if drop_last:
        del order[count - count % batch :]
    expected = [order[start : start + batch] for start in range(0, len(order), batch)]
    assert [used_in(step) for _, step in done] == expected
    assert state["used"] == len(order)
    for size, step in done:
        weights = {round(weight * len(used_in(step)) / size, 9) for share in step for _, weight in share if weight}
        assert weights == {1}  # within a step all samples weigh the same


@MANY
@given(count=st.integers(1, 40), batch=st.integers(7, 20), size=st.integers(1, 7))
def test_the_gradient_is_that_of_the_global_batch(count, batch, size):
    """DDP's average of the ranks' weighted means is the mean over the batch, also for remainders and the last batch."""
    torch.manual_seed(count)
    inputs, targets = torch.randn(count, 3, dtype=torch.float64), torch.randn(count, dtype=torch.float64)
    weight = torch.randn(3, dtype=torch.float64)

    def gradient(samples):
        w = weight.clone().requires_grad_()
        (inputs[samples] @ w - targets[samples]).square().mean().backward()
        return w.grad

    with pytest.MonkeyPatch.context() as monkeypatch:
        samplers = [ElasticSampler(range(count), global_batch=batch) for _ in range(size)]
        for step, _ in Ranks(monkeypatch, samplers, samplers[0].state_dict()).steps(batch):
            weighted = [gradient([sample for sample, _ in share]) * sum(w for _, w in share) for share in step]
            torch.testing.assert_close(sum(weighted) / size, gradient(used_in(step)), rtol=1e-12, atol=1e-13)


def test_parts_of_a_share_have_weights_too(as_rank):
    """Gradients accumulated over parts of a share add up to the gradient of the whole share."""
    losses = torch.arange(9.0, dtype=torch.float64)
    sampler = ElasticSampler(range(9), shuffle=False, global_batch=9)
    total = 0.0
    for rank in range(2):
        as_rank(rank, 2)
        for part in losses[list(sampler)].split(2):
            total += part.mean().item() * sampler.weight(len(part)) / 2
    assert total == pytest.approx(losses.mean().item())


@pytest.mark.parametrize("global_batch", [None, 9])
@pytest.mark.parametrize("persistent", [False, True])
def test_what_was_fetched_ahead_is_not_lost(as_rank, global_batch, persistent):
    """A DataLoader that is dropped with batches under way begins again with the first sample not recorded."""
    as_rank(0, 1)
    data = torch.arange(50) + 100
    sampler = ElasticSampler(data, global_batch=global_batch)
    loader = DataLoader(
        data, batch_size=9, sampler=sampler, num_workers=2, prefetch_factor=2, persistent_workers=persistent
    )
    used = []
    for steps in (1, 2, 10):
        batches = iter(loader)
        for _ in range(steps):
            batch = next(batches, None)
            if batch is None:
                break
            used += batch.tolist()
            sampler.record_batch(len(batch))
        next(batches, None)  # fetched, never trained on
        del batches
    assert sorted(used) == data.tolist()
    assert used == [100 + index for index in ElasticSampler(data)]


def test_ranks_that_were_seeded_differently_agree(monkeypatch):
    """The state carries the seed: ranks of an unseeded program still share out one order."""
    samplers = [ElasticSampler(range(60), seed=seed, global_batch=7) for seed in (11, 12, 13)]
    ranks = Ranks(monkeypatch, samplers, samplers[0].state_dict())
    used = [sample for step, _ in ranks.steps(7) for sample in used_in(step)]
    assert sorted(used) == list(range(60))
