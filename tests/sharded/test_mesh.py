"""The mesh has all ranks, whatever the hosts are: its sizes fit the world, and its dimensions the hosts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbelastic as nbe
from nbelastic.errors import NoWorldError, UsageError
from nbelastic.sharded.mesh import mesh_shape

HOSTS = st.lists(st.integers(1, 9), min_size=1, max_size=9)
WANTED = st.none() | st.integers(1, 40)


def ranks_by_host(hosts):
    return [host for host, count in enumerate(hosts) for _ in range(count)]


@given(HOSTS, WANTED, WANTED)
def test_every_rank_has_one_place(hosts, shard, tensor):
    """The product of the sizes is the world's size, and the names follow the arguments only."""
    names, sizes = mesh_shape(hosts, shard, tensor)
    product = 1
    for size in sizes:
        product *= size
    assert product == sum(hosts)
    assert names == ("replicate",) * (shard is not None) + ("shard",) + ("tensor",) * (tensor is not None)


@given(HOSTS, WANTED, st.integers(1, 40))
def test_a_tensor_group_is_within_one_host(hosts, shard, tensor):
    """Neighbours in the last dimension are on one host, and they are as many as the hosts and the argument allow."""
    _, sizes = mesh_shape(hosts, shard, tensor)
    assert sizes[-1] <= tensor
    of = ranks_by_host(hosts)
    for first in range(0, sum(hosts), sizes[-1]):
        assert len(set(of[first : first + sizes[-1]])) == 1
    assert not [more for more in range(sizes[-1] + 1, tensor + 1) if all(count % more == 0 for count in hosts)]


@given(HOSTS, st.integers(1, 40), WANTED)
def test_a_copy_of_the_model_has_the_ranks_that_it_needs_and_no_more(hosts, shard, tensor):
    """`shard` ranks or the next larger divisor share a copy; if the world is smaller than `shard`, all do."""
    names, sizes = mesh_shape(hosts, shard, tensor)
    found = dict(zip(names, sizes, strict=True))
    rest = sum(hosts) // found.get("tensor", 1)
    assert found["shard"] >= min(shard, rest)
    assert not [less for less in range(shard, found["shard"]) if rest % less == 0]


@pytest.mark.parametrize(
    ("hosts", "shard", "tensor", "sizes"),
    [
        ([2, 2], None, None, {"shard": 4}),
        ([2, 2], 2, None, {"replicate": 2, "shard": 2}),
        ([2, 1], 2, None, {"replicate": 1, "shard": 3}),
        ([2, 1], None, 2, {"shard": 3, "tensor": 1}),
        ([4, 8], 2, 4, {"replicate": 1, "shard": 3, "tensor": 4}),
        ([1], 8, 8, {"replicate": 1, "shard": 1, "tensor": 1}),
    ],
)
def test_examples(hosts, shard, tensor, sizes):
    """A lost rank may leave a world in which the wanted sizes are impossible."""
    assert mesh_shape(hosts, shard, tensor) == (tuple(sizes), tuple(sizes.values()))


def test_wrong_arguments_and_places_are_refused():
    """The errors name the argument, or say that there is no world here."""
    with pytest.raises(UsageError, match=r"device_mesh\(shard=0\): at least 1"):
        nbe.device_mesh(shard=0)
    with pytest.raises(UsageError, match="tensor"):
        nbe.device_mesh(tensor=1.5)
    with pytest.raises(NoWorldError):
        nbe.device_mesh()
