"""A shard is copied into one block of memory, which says of which commit it is."""

import torch

from nbelastic.sharded.arena import Arena, Arenas, ShardTensor
from nbelastic.sharded.whole_commits import Commit


def shard_of(tensors):
    return {ShardTensor("p", "", str(i), str(t.dtype).removeprefix("torch.")): t for i, t in enumerate(tensors)}


def test_a_shard_fits_in_one_block():
    """Each tensor has its own aligned place, whatever the types and sizes are; another process maps the same values."""
    tensors = [torch.randn(3, 5), torch.ones(7, dtype=torch.bfloat16), torch.empty(0, 4), torch.tensor([True] * 3)]
    shard, shapes = shard_of(tensors), [tuple(one.shape) for one in tensors]
    arena = Arena(tuple(shard), shapes)
    arena.fill(shard, Commit(1, 2))
    assert arena.block.nbytes == 64 * 3
    for found in (arena, Arena(tuple(shard), shapes, arena.fd)):
        for name, one in found.tensors.items():
            assert torch.equal(one, shard[name])
            assert one.data_ptr() % 64 == 0 or not one.numel()


def test_a_block_is_of_no_commit_while_it_is_written():
    """A worker that has mapped the memory sees the commit only when all of it is there."""
    shard = shard_of([torch.ones(4)])
    arena = Arena(tuple(shard), [(4,)])
    mapped = Arena(tuple(shard), [(4,)], arena.fd)
    assert mapped.commit is None
    arena.fill(shard, Commit(3, 9))
    assert mapped.commit == Commit(3, 9)
    arena.unseal()
    assert mapped.commit is None


def test_two_arenas_take_turns():
    """The arena that was taken last is not the next one, so the last whole commit stays while the next is filled."""
    arenas = Arenas((ShardTensor("p"),), [(4,)])
    assert arenas.nbytes == 0
    one, two = arenas.take(), arenas.take()
    assert one is not two
    assert [arenas.take() for _ in range(4)] == [one, two, one, two]
    assert arenas.nbytes == one.nbytes + two.nbytes


def test_an_owner_that_dies_while_it_seals():
    """One of the two numbers is written: no commit is complete."""
    arena = Arena([ShardTensor("weight")], [(2,)])
    arena._header[0] = 3
    assert arena.commit is None
