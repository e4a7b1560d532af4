"""A model that was sharded in place is made whole again, for the next world."""

import pytest
import torch
from torch import nn

from nbelastic.integrations.unsharded import Unsharded
from tests.sharded.fake_world import fake_world, sharded


class Net(nn.Module):
    """It has a shared weight, a buffer, and a layer that is made when it is sharded."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.head = None
        self.seen = 0
        self.register_buffer("calls", torch.zeros(1))

    def configure(self, mesh):
        if self.head is None:
            self.head = nn.Linear(3, 2)
        self.configured = True
        nn.init.ones_(self.head.weight)
        sharded(self, mesh)


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Net()


def shard(model, unsharded, size, empty=False):
    """As a world of this size does."""
    unsharded.restore(empty=empty)
    with fake_world(0, size) as mesh:
        model.configure(mesh)
        unsharded.sharded()
        return {name: parameter.to_local().shape for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("empty", [False, True], ids=["first values", "empty"])
def test_each_world_shards_the_model_anew(model, empty):
    """The layers stay the same objects. The model is what it was, and its own parameters have kept their values."""
    layers, own = list(model.modules()), model.first.weight
    value = own.detach().clone()
    unsharded = Unsharded(model)
    assert shard(model, unsharded, 1)["first.weight"] == (3, 3)
    assert shard(model, unsharded, 3, empty)["first.weight"] == (1, 3)
    unsharded.restore(empty=empty)
    assert list(model.modules()) == layers
    assert {type(layer) for layer in layers} == {Net, nn.Linear}
    assert model.head is None
    assert model.second.weight is model.first.weight
    assert model.first.weight.is_meta == empty
    assert torch.equal(own, value)
    assert empty or torch.equal(model.first.weight, value)


def test_attributes_of_the_program_stay(model):
    """What sharding has set is undone; what the training has set is not."""
    unsharded = Unsharded(model)
    shard(model, unsharded, 3)
    model.seen, model.best = 7, 0.5
    model.eval()
    unsharded.restore(empty=True)
    assert (model.seen, model.best, model.training) == (7, 0.5, False)
    assert not hasattr(model, "configured")


def test_a_world_that_begins_anew_has_the_first_buffers(model):
    """A rank may die before the first commit, after others have made a forward pass."""
    unsharded = Unsharded(model)
    shard(model, unsharded, 3)
    model.calls += 1
    unsharded.restore(empty=False)
    assert model.calls == 0


def test_the_first_values_are_forgotten(model):
    """After the first commit the memory of the whole model is free."""
    unsharded = Unsharded(model)
    shard(model, unsharded, 3)
    unsharded.forget_values()
    unsharded.forget_values()
    unsharded.restore(empty=False)
    assert all(parameter.is_meta for parameter in model.parameters())
