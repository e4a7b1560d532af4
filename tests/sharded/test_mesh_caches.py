"""Worlds of the same size have equal meshes, and torch caches what operations give: nothing of an old world may come back."""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, _random
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos

from nbelastic import ShardedState
from tests.sharded.fake_world import fake_world


def second_of_two_worlds(*, clear=False, between=lambda: None):
    """Of an operation's result in the second world: whether its mesh is that world's, and the first row of its chunk."""
    with fake_world(0, 4, clear=clear) as mesh:
        torch.empty_like(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
    between()
    with fake_world(3, 4) as mesh:
        found = torch.empty_like(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
        (chunk,) = found.__create_chunk_list__()
        return found.device_mesh is mesh, tuple(chunk.offsets)


def test_a_new_world_gets_its_own_mesh_and_ranks():
    """Results have the mesh of the world they were made in, and chunks begin where this rank's part begins now."""
    assert second_of_two_worlds(clear=True) == (True, (6,))


def test_without_clearing_an_old_world_comes_back():
    """The caches that are cleared are the ones that matter: this fails when torch no longer needs it."""
    assert second_of_two_worlds() != (True, (6,))


def test_a_world_that_ends_before_bind_does_not_come_back_either():
    """A second rank may be lost while the others build and shard their models."""
    assert second_of_two_worlds(between=lambda: ShardedState().generation_ended(aborted=True)) == (True, (6,))


def test_no_plan_of_an_old_world_is_kept():
    """A plan to redistribute a tensor, and the costs of a mesh, refer to the mesh that they were made for."""
    with fake_world(0, 4, clear=False) as mesh:
        DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False).redistribute(placements=[Replicate()])
        MeshTopoInfo.build_from_mesh(mesh)
    kept = [one.cache_info().currsize for one in (_gen_transform_infos, MeshTopoInfo.build_from_mesh)]
    ShardedState().generation_ended(aborted=True)
    assert (kept, [one.cache_info().currsize for one in (_gen_transform_infos, MeshTopoInfo.build_from_mesh)]) == (
        [1, 1],
        [0, 0],
    )


def test_all_ranks_of_a_world_make_torchs_tracker_of_random_numbers(monkeypatch):
    """Its constructor broadcasts: a newcomer would broadcast alone, while the others use the tracker that they have."""
    monkeypatch.setattr(_random, "_rng_tracker", object())
    ShardedState().generation_ended(aborted=True)
    assert _random._rng_tracker is None
