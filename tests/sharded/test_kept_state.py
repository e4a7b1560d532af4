"""What a hung worker keeps on disk is what its successor holds."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nbelastic as nbe
from nbelastic.sharded.arena import ShardTensor
from nbelastic.sharded.chunks import Chunk, Layout, Parameter
from nbelastic.sharded.holdings import Holdings
from nbelastic.sharded.kept_state import INDEX, load_kept, write_kept
from nbelastic.sharded.whole_commits import Commit

WEIGHT = ShardTensor("model.weight", dtype="float64")
COMMIT = Commit(3, 8)


def holder(held=None):
    """A state between two generations."""
    return SimpleNamespace(
        _holdings=held or Holdings(), _replication=None, _bound=None, _live_commit=None, commits=8 if held else 0
    )


def two_shards():
    """Rank 1 of two holds its own shard, and that of rank 0 in the memory of its host."""
    held = Holdings()
    chunks = tuple(Chunk((start,), (2,)) for start in (0, 2))
    held.add_generation(Layout(3, ("a", "a"), {"model.weight": Parameter((4,), "float64", chunks)}), 1)
    held.add_own(COMMIT, {WEIGHT: torch.tensor([3.0, 4.0])}, {"small": {"step": 8}, "random": object()})
    held.keep(COMMIT)
    held.add_copy(COMMIT, 0, {WEIGHT: torch.tensor([1.0, 2.0])})
    return held


def test_a_successor_holds_what_the_hung_worker_held(tmp_path):
    """Its own shard and the copies of others, the small values, and its rank in that generation."""
    held = two_shards()
    write_kept(holder(held), tmp_path / "kept")
    successor = holder()
    load_kept(successor, tmp_path / "kept", 8)
    found = successor._holdings
    assert (successor.commits, found.statement()) == (8, held.statement())
    assert found.records == {COMMIT: {"small": {"step": 8}}}
    assert all(torch.equal(shard[WEIGHT], held.shards[one][WEIGHT]) for one, shard in found.shards.items())


@pytest.mark.parametrize(("damage", "message"), [("none", "commit 8 instead of commit 9"), (INDEX, "cannot be read")])
def test_an_unusable_kept_state_raises(tmp_path, damage, message):
    """A kept state that is incomplete or of another commit raises: the training must not begin anew."""
    write_kept(holder(two_shards()), tmp_path / "kept")
    (tmp_path / "kept" / damage).unlink(missing_ok=True)
    with pytest.raises(nbe.StateError, match=message):
        load_kept(holder(), tmp_path / "kept", 9)


class Touch:
    """When it is unpickled with all that pickle can do, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_kept_state_runs_no_code(tmp_path):
    """The folder may be one that others can write to."""
    write_kept(holder(two_shards()), tmp_path / "kept")
    torch.save(Touch(tmp_path / "touched"), tmp_path / "kept" / INDEX)
    with pytest.raises(nbe.StateError, match="cannot be read"):
        load_kept(holder(), tmp_path / "kept", 8)
    assert not (tmp_path / "touched").exists()
