"""The samples that an ElasticSampler gives to each rank, and what it refuses. `test_exactly_once.py` tests that none is lost."""

import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

import nbelastic as nbe
from nbelastic import ElasticSampler, StateError, UsageError


def shares(as_rank, size, sampler):
    """The samples that each rank of a world gets."""
    found = []
    for rank in range(size):
        as_rank(rank, size)
        found.append(list(sampler))
        assert len(sampler) == len(found[-1])
    return found


def test_the_order_changes_each_epoch_and_is_the_same_on_all_ranks():
    """Seed and epoch give the order of the samples, which all ranks share."""
    one, two, other = ElasticSampler(range(100)), ElasticSampler(range(100)), ElasticSampler(range(100), seed=1)
    assert list(one) == list(two) != list(other)
    first = list(one)
    one.set_epoch(1)
    assert sorted(first) == sorted(one) == list(range(100))
    assert list(one) != first


def test_without_shuffling_the_order_is_that_of_the_data(as_rank):
    """Without shuffling consecutive samples go to consecutive ranks."""
    sampler = ElasticSampler(range(7), shuffle=False)
    as_rank(1, 3)
    assert list(sampler) == [1, 4, 0]
    sampler.record_batch(1)
    assert list(sampler) == [4, 3]
    assert len(sampler) == 2


def test_the_padding_is_spread_over_few_samples(as_rank):
    """With fewer samples left than ranks, each rank still gets one."""
    assert shares(as_rank, 5, ElasticSampler(range(2), shuffle=False)) == [[0], [1], [0], [1], [0]]


def test_an_epoch_begins_once(as_rank):
    """A function that starts again from its top sets the same epoch again: used samples stay used."""
    as_rank(0, 2)
    sampler = ElasticSampler(range(10))
    sampler.set_epoch(3)
    sampler.record_batch(2)
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.used) == (3, 4)
    sampler.set_epoch(4)
    assert (sampler.epoch, sampler.used) == (4, 0)


def test_the_same_epoch_as_a_text_or_with_a_fraction(as_rank):
    """A text, as of the environment, is its number. A fraction is refused: each call with another one would begin anew."""
    as_rank(0, 2)
    sampler = ElasticSampler(range(10))
    sampler.set_epoch(3)
    sampler.record_batch(2)
    sampler.set_epoch("3")
    with pytest.raises(UsageError, match=r"^epoch must be a whole number, not 3\.25\.$"):
        sampler.set_epoch(3.25)
    assert (sampler.epoch, sampler.used) == (3, 4)


def test_no_sample_is_left_at_the_end(as_rank):
    """After the last sample an iteration is empty, and a larger count is limited to the number of samples."""
    as_rank(0, 3)
    sampler = ElasticSampler(range(4))
    sampler.record_batch(100)
    assert (list(sampler), len(sampler), sampler.used) == ([], 0, 4)


def test_without_a_world_a_sampler_gives_all_samples():
    """Without a world, as in a notebook, the same loop gets all samples."""
    assert sorted(ElasticSampler(range(5))) == [0, 1, 2, 3, 4]
    assert len(ElasticSampler([])) == 0
    assert list(ElasticSampler([])) == []


def test_each_seed_and_epoch_has_its_own_order():
    """Each integer as a seed gives another order, although torch's generator uses only 32 bits."""
    orders = {
        tuple(one)
        for seed in (0, 1, -1, 4096, 2**32, 2**64, 2**100)
        for epoch in (0, 1, 2)
        for one in [ElasticSampler(range(50), seed=seed)]
        if one.set_epoch(epoch) is None
    }
    assert len(orders) == 21


def test_drop_last_leaves_the_remainder(as_rank):
    """With `drop_last` no sample is repeated, and the remainder waits for a world of another size."""
    sampler = ElasticSampler(range(8), shuffle=False, drop_last=True)
    assert shares(as_rank, 3, sampler) == [[0, 3], [1, 4], [2, 5]]
    assert shares(as_rank, 9, sampler) == [[]] * 9
    as_rank(0, 3)
    sampler.record_batch(64)
    assert (sampler.used, len(sampler)) == (6, 0)
    assert shares(as_rank, 2, sampler) == [[6], [7]]


def test_a_global_batch_is_split_among_the_ranks(as_rank):
    """Ranks get consecutive pieces of a global batch, the first ones its remainder, also of the last batch."""
    sampler = ElasticSampler(range(16), shuffle=False, global_batch=7)
    assert shares(as_rank, 3, sampler) == [[0, 1, 2, 7, 8, 9, 14], [3, 4, 10, 11, 15], [5, 6, 12, 13, 14]]
    assert shares(as_rank, 2, sampler) == [[0, 1, 2, 3, 7, 8, 9, 10, 14], [4, 5, 6, 11, 12, 13, 15]]
    sampler.drop_last = True
    assert shares(as_rank, 3, sampler) == [[0, 1, 2, 7, 8, 9], [3, 4, 10, 11], [5, 6, 12, 13]]


def test_the_shares_of_a_global_batch(as_rank):
    """`local_batch_size` is this rank's share in the present world; without a world, the whole batch."""
    assert nbe.local_batch_size(7) == 7
    found = []
    for rank in range(3):
        as_rank(rank, 3)
        found.append(nbe.local_batch_size(7))
    assert found == [3, 2, 2]


def test_weights_follow_the_shares(as_rank):
    """A weight is samples times ranks per global batch; parts of a share add up; a repeated sample has weight 0."""
    sampler = ElasticSampler(range(8), shuffle=False, global_batch=7)
    as_rank(0, 3)
    assert sampler.weight(3) == 9 / 7
    assert sampler.weight(2) + sampler.weight(1) == pytest.approx(9 / 7)
    as_rank(1, 3)
    assert sampler.weight(2) == 6 / 7
    sampler.record_batch(2)
    assert list(sampler) == [7]
    assert sampler.weight(1) == 0.0
    as_rank(0, 3)
    assert sampler.weight(1) == 3.0
    sampler.record_batch(1)
    with pytest.raises(UsageError, match=r"epoch 0 has no batch left to weigh: ask for weight\(\) before record_batch"):
        sampler.weight(1)
    assert ElasticSampler(range(8)).weight(5) == 1.0


@pytest.mark.parametrize(
    "options", [{}, {"drop_last": True}, {"global_batch": 7}, {"global_batch": 5, "drop_last": True}]
)
@pytest.mark.parametrize("count", range(5, 23))
def test_all_ranks_know_how_many_samples_of_each_batch_count(as_rank, options, count):
    """Together they are the samples that are used in this step: each once, without the repeated ones."""
    sampler, size = ElasticSampler(range(count), shuffle=False, **options), 4
    while True:
        as_rank(0, size)
        before, shown = sampler.used, sampler.shares(2)
        if not sum(shown):
            break
        used = [
            index for one, share in zip(shares(as_rank, size, sampler), shown, strict=True) for index in one[:share]
        ]
        as_rank(0, size)
        sampler.record_batch(min(max(shown), 2))
        assert sorted(used) == list(range(before, sampler.used))


def test_a_wrong_share_is_refused_at_once(as_rank):
    """A DataLoader with another batch size is refused: some samples would be used twice and others never."""
    sampler = ElasticSampler(range(100), global_batch=64)
    as_rank(1, 3)
    for wrong in (64, 22, 20):
        with pytest.raises(
            UsageError, match=f"{wrong} samples are not this rank's share .* which is 21: make the Data"
        ):
            sampler.record_batch(wrong)
    with pytest.raises(UsageError, match=r"batch_size=nbe.local_batch_size\(64\)"):
        sampler.weight(64)
    sampler.record_batch(21)
    sampler.record_batch(21)  # its share of the last 36 is 12, and that is what counts
    assert (sampler.used, list(sampler)) == (100, [])


@pytest.mark.parametrize("wrong", [0, -4, 2.5, "8", None])
def test_an_invalid_size_is_refused_at_once(wrong):
    """The error for an invalid size names the argument."""
    sampler = ElasticSampler(range(9))
    with pytest.raises(UsageError, match=r"batch_size must be a positive integer, not "):
        sampler.record_batch(wrong)
    with pytest.raises(UsageError, match=r"batch_size must be a positive integer, not "):
        sampler.weight(wrong)
    with pytest.raises(UsageError, match=r"global_batch must be a positive integer, not "):
        nbe.local_batch_size(wrong)
    if wrong is not None:
        with pytest.raises(UsageError, match=r"global_batch must be a positive integer, not "):
            ElasticSampler(range(9), global_batch=wrong)


def test_more_ranks_than_samples_in_a_batch(as_rank):
    """A batch with fewer samples than ranks is refused, and the error names two remedies."""
    as_rank(4, 5)
    with pytest.raises(UsageError, match=r"of 4 cannot be split among 5 ranks: make it at least 5, or .* max=4"):
        nbe.local_batch_size(4)
    with pytest.raises(UsageError, match="cannot be split among 5 ranks"):
        iter(ElasticSampler(range(100), global_batch=4))


def test_a_dataset_without_length():
    """A dataset without a length is refused, because its samples cannot be shared out."""
    with pytest.raises(UsageError, match=r"a Stream has no length, .*: give range\(n\)"):
        ElasticSampler(Stream(None))


def test_the_state_is_plain_and_small():
    """The sampler's state is plain data with seed and number of samples; an older state without them loads too."""
    sampler = ElasticSampler(range(9), seed=7)
    sampler.record_batch(4)
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state == {"epoch": 0, "used": 4, "seed": 7, "samples": 9}
    other = ElasticSampler(range(9), global_batch=3)
    other.load_state_dict(state)
    assert list(other) == list(sampler)
    other.load_state_dict({"epoch": 1, "used": 2})
    assert (other.epoch, other.used, other.seed) == (1, 2, 7)


@pytest.mark.parametrize("state", [{"samples": 10, "used": 3}, {"used": 10}, {"used": -1}])
def test_a_state_of_other_data_is_refused(state):
    """A state of a dataset of another size is refused: its position has no meaning here."""
    with pytest.raises(StateError, match=r"belongs to a dataset of .* samples, and this one has 9: use the same data"):
        ElasticSampler(range(9)).load_state_dict({"epoch": 0, **state})


class Stream(IterableDataset):
    """A dataset that iterates over the sampler itself."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(self.sampler)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 1},
        pytest.param({"num_workers": 1, "multiprocessing_context": "spawn"}, marks=pytest.mark.soak),
    ],
)
def test_a_stream_may_iterate_over_the_sampler(as_rank, options):
    """A stream may iterate over the sampler in this process or in one process of a DataLoader."""
    as_rank(1, 2)
    sampler = ElasticSampler(range(10), shuffle=False, global_batch=4)
    sampler.record_batch(2)
    batches = DataLoader(Stream(sampler), batch_size=nbe.local_batch_size(4), **options)
    assert [batch.tolist() for batch in batches] == [[6, 7], [9]]


@pytest.fixture
def inside(monkeypatch):
    """`inside(n)`: as if in one of a DataLoader's n processes. With real ones torch takes 5 s to end after an error."""

    def of(processes):
        info = SimpleNamespace(num_workers=processes)
        monkeypatch.setattr("nbelastic.state.sampler.get_worker_info", lambda: info)

    return of


def test_several_processes_that_iterate_over_a_sampler_are_refused(inside):
    """Several processes that iterate over copies of a sampler are refused: they would give the same samples."""
    inside(2)
    with pytest.raises(UsageError, match="each of the DataLoader's 2 processes would give the same samples: use num_w"):
        list(ElasticSampler(range(8)))


def test_a_process_that_outlives_the_pass_is_refused(inside):
    """A process that outlives its pass is refused until `set_epoch`: its copy does not know which samples were used."""
    inside(1)
    sampler = ElasticSampler(range(8))
    assert len(list(sampler)) == 8
    with pytest.raises(
        UsageError, match="not know which samples of epoch 0 were used since it began: use persistent_workers=F"
    ):
        list(sampler)
    sampler.set_epoch(1)
    assert len(list(sampler)) == 8


def test_a_rank_is_pickled_for_a_dataloaders_process_only(as_rank, inside, monkeypatch):
    """A sampler that was pickled in a world gives this rank's samples in a DataLoader's process, and else all of them."""
    as_rank(1, 3)
    pickled = pickle.dumps(ElasticSampler(range(9), shuffle=False))
    monkeypatch.undo()
    assert list(pickle.loads(pickled)) == list(range(9))
    inside(1)
    assert list(pickle.loads(pickled)) == [1, 4, 7]


def test_batch_samplers(as_rank):
    """torch's BatchSampler over the sampler makes the same batches."""
    as_rank(2, 3)
    sampler = ElasticSampler(range(40), global_batch=16)
    batches = BatchSampler(sampler, nbe.local_batch_size(16), drop_last=False)
    data = list(range(40))
    by_size = DataLoader(data, batch_size=nbe.local_batch_size(16), sampler=sampler)
    found = [batch.tolist() for batch in DataLoader(data, batch_sampler=batches)]
    assert found == [batch.tolist() for batch in by_size]
    assert [len(batch) for batch in found] == [5, 5, 2]
    assert len(batches) == 3
