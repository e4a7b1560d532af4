"""Worlds of the same size have equal meshes, and torch caches what operations give: nothing of an old world may come back."""

import torch
from torch.distributed.tensor import DTensor, Shard

from tests.sharded.fake_world import fake_world


def second_of_two_worlds(*, clear):
    """Of an operation's result in the second world: whether its mesh is that world's, and the first row of its chunk."""
    with fake_world(0, 4, clear=clear) as mesh:
        torch.empty_like(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
    with fake_world(3, 4) as mesh:
        found = torch.empty_like(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
        (chunk,) = found.__create_chunk_list__()
        return found.device_mesh is mesh, tuple(chunk.offsets)


def test_a_new_world_gets_its_own_mesh_and_ranks():
    """Results have the mesh of the world they were made in, and chunks begin where this rank's part begins now."""
    assert second_of_two_worlds(clear=True) == (True, (6,))


def test_without_clearing_an_old_world_comes_back():
    """The caches that are cleared are the ones that matter: this fails when torch no longer needs it."""
    assert second_of_two_worlds(clear=False) != (True, (6,))
