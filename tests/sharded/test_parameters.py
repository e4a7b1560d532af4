"""Every way in which torch splits a parameter over ranks is one chunk per rank, or refused by name."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nbelastic.errors import StateError
from nbelastic.sharded.bound import Bound
from nbelastic.sharded.chunks import join
from nbelastic.sharded.parameters import chunk_of, like, local_tensor, plain_name
from tests.sharded.fake_world import fake_world, sharded


def chunks_of_all_ranks(sizes, names, split, make):
    """The layout that the ranks of such a mesh agree on."""
    by_rank = []
    count = torch.Size(sizes).numel()
    for rank in range(count):
        with fake_world(rank, *sizes, names=names) as mesh:
            with torch.device("meta"):
                model = make()
            split(model, mesh)
            by_rank.append(Bound({"model": model.requires_grad_(False)}, {}).own_chunks())
    return join(1, ["a"] * count, by_rank)


def over_hosts(model, mesh):
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])


@pytest.mark.parametrize("inner", [16, 10, 6])
def test_tensor_parallelism_and_fully_shard_in_the_same_dimension(inner):
    """Rows that are split over a host's ranks first, and then over hosts, tile the weight."""
    layout = chunks_of_all_ranks(
        (2, 2), ("shard", "tensor"), over_hosts, lambda: nn.Sequential(nn.Linear(3, inner), nn.Linear(inner, 4))
    )
    starts = [chunk.offsets[0] for chunk in layout.parameters["model.0.weight"].chunks]
    assert starts == [0, inner // 2, -(-inner // 4), inner // 2 + -(-inner // 4)]
    assert {len(ranks) for ranks in layout.owners()} == {1, 2}  # the second bias is on both ranks of a host


@pytest.mark.parametrize(("sizes", "names"), [((3,), ("shard",)), ((2, 2), ("replicate", "shard"))])
def test_rows_fewer_than_ranks(sizes, names):
    """Ranks without a row have no chunk; replicas have the same chunk."""
    layout = chunks_of_all_ranks(sizes, names, sharded, lambda: nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 2)))
    held = [[chunk is not None for chunk in one.chunks] for one in layout.parameters.values()]
    one, two = ([True, False, False], [True, True, False]) if len(sizes) == 1 else ([True, False] * 2, [True] * 4)
    assert held == [one, one, two, two]


def test_modules_that_are_not_sharded_are_whole_on_each_rank():
    """A plain parameter has as many owners as there are ranks."""
    layout = chunks_of_all_ranks(
        (3,),
        ("shard",),
        lambda model, mesh: fully_shard(model[0], mesh=mesh),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
    )
    assert frozenset(range(3)) in layout.owners()
    assert len(layout.owners()) == 4


def test_names_do_not_depend_on_wrappers():
    """A later call may compile or checkpoint other layers than the first one."""
    model = nn.Sequential(nn.Linear(1, 1), checkpoint_wrapper(nn.Linear(1, 1)))
    model[0] = torch.compile(model[0], backend="eager")
    assert [plain_name(name) for name, _ in model.named_parameters()] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    ]


def test_values_that_are_not_reduced_are_refused():
    """A Partial DTensor has no values of its own."""
    with fake_world(0, 2) as mesh:
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(StateError, match="w is a DTensor with unreduced"):
            chunk_of("w", partial)


def test_several_chunks_on_a_rank_are_refused():
    """Split over a dimension that was split before in another order, a rank may have rows that are not neighbours."""
    with fake_world(0, 2) as mesh:
        odd = DTensor.from_local(torch.ones(3, 1), mesh, [Shard(0)], run_check=False, shape=(4, 1), stride=(1, 1))
        with pytest.raises(StateError, match=r"w has \(3, 1\) on this rank, as the chunks \[0:2, 0:1\]"):
            chunk_of("w", odd)


def test_a_tensor_like_a_parameter_is_split_as_it_is():
    """Optimizer tensors are made of their local parts; a plain parameter has plain ones."""
    with fake_world(1, 2) as mesh:
        parameter = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
        made = like(parameter, torch.zeros(2, 3))
        assert (made.shape, made.placements, made.device_mesh) == (parameter.shape, parameter.placements, mesh)
        assert local_tensor(made).sum() == 0
        whole = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
        assert like(whole, torch.zeros(2)).placements == (Replicate(),)
    plain = torch.zeros(3)
    assert like(torch.ones(3), plain) is plain
