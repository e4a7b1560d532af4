"""An ElasticStream: each sample of its shards once, the same number of batches on all ranks, and what it refuses."""

import itertools
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

import nbelastic as nbe
from nbelastic import ElasticStream, StateError, UsageError
from tests.state.streams import Ranks, read
from tests.support.soak import examples

WORLDS = st.lists(
    st.tuples(
        st.integers(1, 5),  # ranks
        st.integers(0, 6),  # steps that are committed
        st.integers(0, 3),  # steps that were made after the last commit, when a rank was killed; 0: a planned change
    ),
    min_size=1,
    max_size=5,
)
MANY = settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])


def numbered(lengths):
    """Shards of these lengths, whose samples are the numbers from 0; and the function that opens one."""
    starts = list(itertools.accumulate(lengths, initial=0))
    return ElasticStream(range(len(lengths)), lambda shard: iter(range(starts[shard], starts[shard + 1])))


def steps_of(monkeypatch, size, lengths, state, most, batch, **options):
    """Up to `most` steps of a world that goes on from `state`: per step the (sample, weight)s by rank, and the next state."""

    def task(rank):
        stream = numbered(lengths)
        stream.load_state_dict(state)
        steps = []
        for samples in itertools.islice(stream.loader(batch, **options), most):
            weight = stream.weight()
            stream.record_batch()
            steps.append(([(s, weight) for s in samples.tolist()], stream.state_dict()))
        return steps

    with monkeypatch.context() as patch:
        by_rank = Ranks(patch, size).each(task)
    assert len({len(steps) for steps in by_rank}) == 1  # a rank with fewer batches would keep the others waiting
    for step in zip(*by_rank, strict=True):
        assert len({str(after) for _, after in step}) == 1
    return [([mine for mine, _ in step], step[0][1]) for step in zip(*by_rank, strict=True)]


@MANY
@given(
    worlds=WORLDS,
    lengths=st.lists(st.integers(0, 17), min_size=1, max_size=9),
    batch=st.integers(1, 6),
    ahead=st.integers(1, 3),
)
def test_each_sample_is_used_once(monkeypatch, worlds, lengths, batch, ahead):
    """Through any worlds, kills and uneven or empty shards; and all samples of a step have the same weight."""
    state, used = numbered(lengths).state_dict(), []
    for number, (size, committed, lost) in enumerate(worlds):
        most = committed + lost if number < len(worlds) - 1 else None
        kept = steps_of(monkeypatch, size, lengths, state, most, batch, ahead=ahead)
        for by_rank, state in kept if most is None else kept[:committed]:  # the next world begins there
            step = [(sample, weight / len(mine)) for mine in by_rank for sample, weight in mine if weight]
            used += [sample for sample, _ in step]
            assert {round(weight * len(step) / size, 9) for _, weight in step} == {1}
    assert sorted(used) == list(range(sum(lengths)))


def test_each_rank_opens_only_its_shards(monkeypatch):
    """No rank reads all the data: four ranks that share eight shards open two each."""
    opened = {rank: set() for rank in range(4)}

    def task(rank):
        stream = ElasticStream(range(8), lambda shard: opened[rank].add(shard) or iter(range(10)))
        return len(read(stream))

    assert set(Ranks(monkeypatch, 4).each(task)) == {20}
    assert sorted(map(len, opened.values())) == [2, 2, 2, 2]
    assert set.union(*opened.values()) == set(range(8))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_was_fetched_ahead_is_not_lost(workers):
    """A loader that is dropped with batches under way begins again with the first sample that was not recorded."""
    stream = numbered([9, 0, 30, 4])
    used = []
    for most in (2, 3, None):
        batches = iter(stream.loader(4, num_workers=workers))
        for batch in itertools.islice(batches, most):
            used += batch.tolist()
            stream.record_batch()
        next(batches, None)  # given, never recorded
        del batches
    assert sorted(used) == list(range(43))
    assert stream.used == 43


def test_a_dataset_that_splits_itself_among_processes_loses_nothing():
    """The stream has already shared out the shards: inside one, a DataLoader's process does not find that it is one."""

    class Splitting(IterableDataset):
        def __iter__(self):
            process = get_worker_info()
            return iter(range(10)) if process is None else iter(range(10)[process.id :: process.num_workers])

    stream = ElasticStream([0, 1, 2], lambda shard: Splitting())
    assert sorted(read(stream, num_workers=2)) == sorted([*range(10)] * 3)


def test_a_shard_can_be_opened_at_an_offset():
    """`open_shard` gets the offset and the epoch if it takes them; without an offset, samples before it are dropped."""
    asked = []

    def seek(shard, offset, epoch):
        asked.append((shard, offset, epoch))
        return range(offset, 10)

    for stream in (ElasticStream(["a"], seek), ElasticStream(["a"], lambda shard: range(10))):
        stream.set_epoch(3)
        next(iter(stream.loader(4)))
        stream.record_batch()
        assert read(stream) == [4, 5, 6, 7, 8, 9]
    assert asked == [("a", 0, 3), ("a", 4, 3)]


def test_shards_of_batches():
    """With `batch_size=None` a shard gives whole batches: they arrive as they are. A new loader goes on after the recorded ones."""
    stream = ElasticStream([0, 1], lambda shard: [{"x": torch.full((3,), shard + part)} for part in (0.0, 0.25, 0.5)])
    found = []
    for most in (1, 3, None):
        for batch in itertools.islice(stream.loader(None), most):
            found.append(batch["x"].tolist())
            stream.record_batch()
    assert found == [[one] * 3 for one in (0.0, 0.25, 0.5, 1.0, 1.25, 1.5)]
    assert read(stream) == []


def test_the_order_of_the_shards_changes_each_epoch():
    """With `shuffle` by seed and epoch, the same on every rank; without it, it is the list's."""
    orders = []
    stream = ElasticStream(range(20), lambda shard: [shard], shuffle=True, seed=3)
    for epoch in (1, 2):
        stream.set_epoch(epoch)
        orders.append(read(stream))
    assert orders[0] != orders[1]
    assert (
        sorted(orders[0]) == sorted(orders[1]) == read(ElasticStream(range(20), lambda shard: [shard])) == [*range(20)]
    )


def test_an_epoch_begins_once():
    """A function that starts again from its top sets the same epoch again: used samples stay used."""
    stream = numbered([10])
    stream.set_epoch(2)
    next(iter(stream.loader(4)))
    stream.record_batch()
    for same in (2, 2.0, "2"):
        stream.set_epoch(same)
    assert stream.used == 4
    stream.set_epoch(3)
    assert stream.used == 0


def test_a_commit_holds_what_was_recorded():
    """A break returns the stream to the commit, and the samples after it are given again."""
    state = nbe.ObjectState(stream=numbered([10]))
    batches = iter(state.stream.loader(2))
    for committed in (True, False):
        next(batches)
        state.stream.record_batch()
        if committed:
            state.commit()
    next(batches)  # given, and not recorded
    state.undo()
    assert read(state.stream) == [2, 3, 4, 5, 6, 7, 8, 9]


class HuggingFaceLike:
    """What an `IterableDataset` of Hugging Face has and does, as far as a stream uses it."""

    def __init__(self, shards, offset=0):
        self.shards, self.offset, self.epoch = shards, offset, 0
        self.num_shards = len(shards)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def shard(self, num_shards, index):
        return HuggingFaceLike(self.shards[index::num_shards])

    def skip(self, n):
        return HuggingFaceLike(self.shards, n)

    def __iter__(self):
        process = get_worker_info()
        mine = self.shards if process is None else self.shards[process.id :: process.num_workers]
        samples = [sample for shard in mine for sample in shard]
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(self.epoch))
        return iter([{"x": samples[at]} for at in order[self.offset :].tolist()])


def hugging_face():
    """The stand-in, and the real one where it is installed."""

    def real(shards):
        import datasets

        def generate(parts):
            for part in parts:
                for number in part:
                    yield {"x": number}

        dataset = datasets.IterableDataset.from_generator(generate, gen_kwargs={"parts": shards})
        return dataset.shuffle(seed=1, buffer_size=5)

    from importlib.util import find_spec

    return [HuggingFaceLike, real] if find_spec("datasets") else [HuggingFaceLike]


@pytest.mark.parametrize("make", hugging_face())
@pytest.mark.parametrize("workers", [0, 2])
def test_a_streaming_dataset_of_hugging_face(make, workers):
    """It is given alone: its shards are shared out, each sample is used once, in another order per epoch."""
    stream = ElasticStream(make([list(range(start, start + 11)) for start in (0, 100, 200, 300)]))
    orders = []
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        used = []
        for most in (3, None):
            for batch in itertools.islice(stream.loader(4, num_workers=workers), most):
                used += batch["x"].tolist()
                stream.record_batch()
        assert sorted(used) == sorted(start + i for start in (0, 100, 200, 300) for i in range(11))
        orders.append(used)
    assert orders[0] != orders[1]


def test_a_loop_that_records_nothing_is_refused():
    """At the end of the epoch, and long before the end of a long one: without a record all samples would be used again."""
    with pytest.raises(UsageError, match=r"5 batches .* call record_batch\(\)"):
        list(numbered([5]).loader(1))
    with pytest.raises(UsageError, match=r"64 batches .* call record_batch\(\)"):
        list(numbered([1000]).loader(1))


def test_a_loop_is_over_when_the_stream_has_another_position():
    """Another epoch, a state that was loaded, or a second loop: a loop that goes on would lose or repeat samples."""
    stream = numbered([10])
    before = stream.state_dict()
    for disturb in (
        lambda: stream.set_epoch(1),
        lambda: stream.load_state_dict(before),
        lambda: next(iter(stream.loader(3))),
    ):
        batches = iter(stream.loader(2))
        next(batches)
        stream.record_batch()
        disturb()
        with pytest.raises(UsageError, match="another position"):
            next(batches)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ElasticStream([], list), "at least one shard"),
        (lambda: ElasticStream([1], "file"), "open_shard must be a function"),
        (lambda: ElasticStream(range(5)), "range is not a streaming dataset"),
        (lambda: ElasticStream(SimpleNamespace(num_shards=1, skip=list)), "SimpleNamespace is not a streaming dataset"),
        (lambda: ElasticStream(SimpleNamespace(num_shards=1, set_epoch=list)), "is not a streaming dataset"),
        (lambda: ElasticStream(SimpleNamespace(skip=list, set_epoch=list)), "is not a streaming dataset"),
        (lambda: ElasticStream([1], list, seed="x"), "seed must be a whole number"),
        (lambda: numbered([1]).loader(0), "batch_size must be a positive integer"),
        (lambda: numbered([1]).loader(1, ahead=0), "ahead must be a positive integer"),
        (lambda: numbered([1]).loader(1, drop_last=True), "leave out drop_last=.*weight"),
        (lambda: numbered([1]).loader(1, num_workers=1, persistent_workers=True), "leave out persistent_workers="),
        (lambda: numbered([1]).loader(1, shuffle=True), "leave out shuffle="),
        (lambda: numbered([1]).record_batch(), "no batch is left to record"),
        (lambda: numbered([1]).weight(), "no batch is left to weigh"),
    ],
)
def test_refusals(call, text):
    """Each wrong use is one line that says what to do."""
    with pytest.raises(UsageError, match=text):
        call()


def test_a_state_of_other_data_is_refused():
    """Other shards, the same ones in another order, or something else than a state."""
    state = ElasticStream(["a", "b"], list).state_dict()
    for shards, text in ((["a"], "2 shards, and this stream has 1"), (["b", "a"], "in another order.*sort them")):
        with pytest.raises(StateError, match=text):
            ElasticStream(shards, list).load_state_dict(state)
    with pytest.raises(StateError, match="not a state of an ElasticStream"):
        ElasticStream(["a"], list).load_state_dict({"epoch": 1})
    ElasticStream([Path("a"), "b"], list).load_state_dict(state)


def test_shards_that_are_objects_have_no_names_to_compare():
    """What another process prints of an object is another text: one of them is enough to leave the names alone."""
    state = ElasticStream(["a", object()], list).state_dict()
    ElasticStream(["a", object()], list).load_state_dict(state)


def test_a_shard_that_has_become_shorter_is_an_error():
    """The samples must be the same each time: this is noticed if the shard ends before the position."""
    stream = ElasticStream(["a"], lambda shard: iter(range(next(lengths))))
    lengths = iter([9, 3])
    for _ in itertools.islice(stream.loader(4), 2):
        stream.record_batch()
    with pytest.raises(StateError, match="8 samples of the shard 'a' were used, and now it has only 3"):
        next(iter(stream.loader(4)))


def test_a_state_is_data():
    """It is saved and sent as plain data."""
    stream = numbered([3, 4])
    read(stream)
    state = pickle.loads(pickle.dumps(stream.state_dict()))
    again = numbered([3, 4])
    again.load_state_dict(state)
    assert (again.used, read(again)) == (7, [])


@pytest.mark.parametrize("differs", ["epoch", "seed"])
def test_a_state_from_the_beginning_of_an_epoch_is_taken(differs):
    """No sample was used yet there, as in a new stream: only the epoch or the seed is another."""
    there, here = ElasticStream(range(9), list, shuffle=True), ElasticStream(range(9), list, shuffle=True)
    setattr(there, differs, 3)
    here.load_state_dict(there.state_dict())
    assert here.state_dict()[differs] == 3
    assert here.remaining() == there.remaining()
