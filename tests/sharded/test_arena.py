"""A shard is copied into one block of memory, which says of which commit it is."""

import torch

from nbelastic.sharded.arena import Arena, Arenas, ShardTensor
from nbelastic.sharded.whole_commits import Commit
from tests.support.fake_cuda import FakeCuda, FakeStream, OnGpu


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


class FakeCudart:
    """Registers memory, and knows what is registered. With `refuses` it has no more."""

    def __init__(self, refuses=False):
        self.refuses, self.registered = refuses, {}

    def cudaHostRegister(self, address, size, _):
        assert address not in self.registered, "the memory that was mapped there before is registered still"
        if self.refuses:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]


def test_pinned_memory_is_released_before_it_is_unmapped(monkeypatch):
    """Else CUDA would take the next memory at that address for the old one, and copy to memory that no process reads."""
    cuda = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    shard = shard_of([torch.ones(1 << 16)])
    for number in range(3):
        arena = Arena(tuple(shard), [(1 << 16,)], pinned=True)
        assert [*cuda.registered.values()] == [arena.nbytes]
        arena.fill(shard, Commit(1, number))
        view = next(iter(arena.tensors.values()))
        del arena
        assert not cuda.registered
        assert view.eq(1).all()  # what is held of it can be read still


def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch):
    """CUDA's error is taken away, which the next launch of a kernel would report; the copies are slower."""
    cuda, launches = FakeCudart(refuses=True), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: launches.append(device))
    shard = shard_of([torch.ones(4)])
    arena = Arena(tuple(shard), [(4,)], pinned=True)
    arena.fill(shard, Commit(1, 1))
    del arena
    assert launches == ["cuda"]


def test_a_commit_is_sealed_when_the_gpu_has_copied_it(monkeypatch):
    """Another process reads the memory as soon as it is sealed, and the copies are only begun when the calls return."""
    cuda = FakeCuda(monkeypatch)
    shard = shard_of([torch.ones(4), torch.ones(5, dtype=torch.bfloat16)])
    arena = Arena(tuple(shard), [(4,), (5,)])
    monkeypatch.setattr(FakeStream, "synchronize", lambda _: cuda.calls.append(arena.commit), raising=False)
    arena.fill({name: one.as_subclass(OnGpu) for name, one in shard.items()}, Commit(1, 1))
    assert cuda.take() == [("main", "cuda", "cpu", 1), ("main", "cuda", "cpu", 1), None]
    assert arena.commit == Commit(1, 1)
