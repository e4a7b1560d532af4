"""A layout is what the ranks' own chunks add up to; anything else is refused with the parameter's name."""

import pytest

from nbelastic.errors import StateError
from nbelastic.sharded.chunks import Chunk, OwnChunk, join
from tests.sharded.meshes import chunks_of


def own(mesh, shape=(8, 2), **more):
    """By rank, what it sends of one parameter `w` that is sharded over the mesh."""
    return [{"w": OwnChunk(shape, "float32", chunk)} | more for chunk in chunks_of(shape, mesh)]


def test_missing_chunks_are_named_with_their_indices():
    """Of a weight with 8 rows over 4 ranks, rank 3 held the last two rows."""
    layout = join(1, "aabb", own((1, 4, 1)))
    assert layout.missing(frozenset({0, 1, 2})) == ["w[6:8, 0:2]"]
    assert layout.missing(frozenset(range(4))) == []


def test_owners_are_the_replicas():
    """HSDP over 2 x 2 ranks: each chunk has two owners."""
    assert set(join(1, "aabb", own((2, 2, 1))).owners()) == {frozenset({0, 2}), frozenset({1, 3})}


def test_ranks_without_a_row_hold_nothing():
    """Three rows over four ranks: the last rank's shard is empty."""
    assert [p["w"].chunk is None for p in own((1, 4, 1), (3, 2))] == [False, False, False, True]
    assert join(1, "aabb", own((1, 4, 1), (3, 2))).missing(frozenset({0, 1, 2})) == []


def test_a_parameter_that_only_one_rank_has_is_an_error():
    """The error for ranks that build different models names the parameter."""
    ranks = own((1, 2, 1))
    ranks[1]["extra"] = ranks[1]["w"]
    with pytest.raises(StateError, match="rank 1 has bound the parameter extra, and rank 0 has not"):
        join(1, "ab", ranks)


def test_other_shapes_on_another_rank_are_an_error():
    """The error names the parameter and both shapes."""
    ranks = [own((1, 2, 1))[0], own((1, 2, 1), (6, 2))[1]]
    with pytest.raises(StateError, match=r"w is \(6, 2\) on rank 1 and \(8, 2\) on rank 0"):
        join(1, "ab", ranks)


def test_chunks_that_overlap_or_leave_a_gap_are_refused():
    """Such a split has no owner for each element."""
    ranks = [{"w": OwnChunk((4,), "float32", Chunk((start,), (2,)))} for start in (0, 1)]
    with pytest.raises(StateError, match="w is split in a way that ShardedState cannot recover"):
        join(1, "ab", ranks)


def test_ranks_that_train_different_parameters_are_named():
    """FSDP would hang or abort."""
    ranks = [{"w": OwnChunk((4,), "float32", Chunk((2 * rank,), (2,)), rank == 0)} for rank in (0, 1)]
    with pytest.raises(StateError, match="w has requires_grad=False on rank 1 and True on rank 0"):
        join(1, ["a", "a"], ranks)
