"""What the ranks of a stream tell each other, and what a rank without samples does meanwhile."""

import pytest

from nbelastic import ElasticStream
from nbelastic.state.stream import exchange
from tests.state.streams import Ranks, read


@pytest.mark.parametrize(("ahead", "exchanges"), [(1, 21), (10, 3)])
def test_ranks_exchange_once_per_ahead_batches(monkeypatch, ahead, exchanges):
    """Twenty batches need one exchange each, and the one that ends the epoch; with `ahead=10` a tenth of that."""
    ranks = Ranks(monkeypatch, 2)
    ranks.each(lambda rank: read(ElasticStream([0, 1], lambda shard: range(40)), 2, ahead=ahead))
    assert ranks.exchanges == exchanges


def test_a_rank_without_any_shard_repeats_a_sample_of_weight_0(monkeypatch):
    """One shard for two ranks: the second one runs as many steps, with samples that do not count."""

    def task(rank):
        stream = ElasticStream(["only"], lambda shard: range(3))
        batches = []
        for batch in stream.loader(2):
            batches.append((batch.tolist(), stream.weight()))
            stream.record_batch()
        return batches

    assert Ranks(monkeypatch, 2).each(task) == [[([0, 1], 2.0), ([2], 2.0)], [([0], 0.0), ([0], 0.0)]]


def test_tiny_shards_may_fill_a_batch_together(monkeypatch):
    """A batch of more shards than a message has room for needs a second one."""

    def task(rank):
        stream = ElasticStream(range(60), lambda shard: [shard])
        for _ in stream.loader(20):
            stream.record_batch()
        return stream.used

    assert Ranks(monkeypatch, 3).each(task) == [60, 60, 60]


@pytest.mark.parametrize(("ahead", "exchanges"), [(1, 9 + 6), (2, 9 + 4), (3, 9 + 2)])
def test_any_number_of_shards_per_batch_reaches_all_ranks(monkeypatch, ahead, exchanges):
    """Whether they just fit into the first message, or need a second one."""
    counts = range(9)

    def sent(rank, count):
        return [[(shard, rank + 1, True) for shard in range(count)], *([] for _ in range(ahead - 1))]

    ranks = Ranks(monkeypatch, 2)
    received = ranks.each(lambda rank: [exchange(sent(rank, count), ahead) for count in counts])
    assert received == [[[sent(rank, count) for rank in range(2)] for count in counts]] * 2
    assert ranks.exchanges == exchanges


def test_ranks_without_samples_repeat_samples_of_different_shards(monkeypatch):
    """They do not all open the same file. They read this epoch's samples, and go on to the next shard if one is empty."""

    def task(rank):
        stream = ElasticStream(range(3), lambda shard, epoch: [10 * epoch + shard] if shard < 2 else [])
        stream.set_epoch(4)
        return next(iter(stream.loader(1))).item()

    assert Ranks(monkeypatch, 6).each(task) == [40, 41, 40, 40, 41, 40]
