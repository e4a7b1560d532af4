"""A model that was made on the meta device gets the values of the whole model, on any number of ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from nbelastic.errors import StateError
from nbelastic.sharded.bound import Bound
from nbelastic.sharded.initial_values import allocate, set_first_values
from nbelastic.sharded.parameters import chunk_of, local_tensor
from nbelastic.sharded.whole_draws import WholeDraws
from tests.sharded.fake_world import fake_world, sharded

CPU = torch.device("cpu")


class Angles(nn.Module):
    """It has no parameter, and one buffer that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.angles.copy_(torch.arange(4) / 4)

    def forward(self, inputs):
        return inputs


def model():
    """Rows fewer than ranks, attention that resets an inner layer, buffers, an embedding, types of numbers."""
    return nn.Sequential(
        nn.Linear(6, 2),
        nn.BatchNorm1d(2),
        nn.TransformerEncoderLayer(6, 2, 5),
        Angles(),
        nn.Embedding(7, 6),
        nn.Linear(5, 5, dtype=torch.bfloat16),
    )


def by_function(whole):
    """What a program gives to `bind(init=…)`."""
    for parameter in whole.parameters():
        if parameter.dim() > 1:
            nn.init.kaiming_normal_(parameter)
        else:
            parameter.copy_(torch.rand_like(parameter) + parameter.clone().bernoulli_(0.5))


def first_values(made, init=None):
    """Allocate the model, and set its values as the first `bind` does."""
    torch.manual_seed(3)
    bound = Bound({"model": made.requires_grad_(False)}, {})
    set_first_values(bound, {"model": allocate(made, CPU)}, init, lambda task: task(), None)


@pytest.mark.parametrize("init", [None, by_function])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_values_are_those_of_the_whole_model(size, init):
    """Each rank's chunk is a part of the model that one process makes after the same seed. Buffers are whole."""
    torch.manual_seed(3)
    whole = model()
    if init is not None:
        torch.manual_seed(3)
        with torch.no_grad():
            init(whole)
    for rank in range(size):
        with fake_world(rank, size) as mesh:
            with torch.device("meta"):
                made = sharded(model(), mesh)
            first_values(made, init)
            for (name, one), wanted in zip(made.named_parameters(), whole.parameters(), strict=True):
                chunk = chunk_of(name, one)
                if chunk is not None:
                    assert torch.equal(local_tensor(one), wanted.detach()[chunk.part]), name
            if init is None:
                for (name, one), wanted in zip(made.named_buffers(), whole.buffers(), strict=True):
                    assert torch.equal(one, wanted), name


def test_an_optimizer_keeps_its_parameters():
    """The parameters of an optimizer that was made before `bind` are those that get the memory."""
    with fake_world(0, 2) as mesh:
        with torch.device("meta"):
            made = sharded(nn.Sequential(nn.Linear(4, 4)), mesh)
        optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
        allocated = allocate(made, CPU)
        assert allocated == set(made.parameters()) == set(optimizer.param_groups[0]["params"])
        assert not any(parameter.is_meta for parameter in made.parameters())


def test_what_has_memory_keeps_its_values():
    """Of a model that is partly on the meta device, only that part gets new values."""
    with torch.device("meta"):
        made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made[0] = nn.Linear(2, 2)
    before = made[0].weight.detach().clone()
    with fake_world(0, 1):
        first_values(made)
    assert torch.equal(made[0].weight, before)
    assert not made[1].weight.is_meta


def test_shared_parameters_stay_shared():
    """Both layers have the same parameter, with the values of the first one."""
    with torch.device("meta"):
        made = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
        made[1].weight = made[0].weight
    with fake_world(0, 1):
        first_values(made)
    torch.manual_seed(3)
    assert made[1].weight is made[0].weight
    assert torch.equal(made[0].weight, nn.Embedding(4, 3).weight)


@pytest.mark.parametrize("tensor", ["parameter", "buffer"])
def test_a_layer_that_cannot_set_its_values_is_named(tensor):
    """Without `reset_parameters()` the program must give an init function; with one there is no error."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            if tensor == "buffer":
                self.register_buffer("factor", torch.ones(2))
            else:
                self.factor = nn.Parameter(torch.ones(2))

    for init in (None, lambda model: model[0].factor.fill_(1.0)):
        with torch.device("meta"):
            made = nn.Sequential(Scale())
        with fake_world(0, 1):
            if init is not None:
                first_values(made, init)
                assert made[0].factor.tolist() == [1.0, 1.0]
                continue
            with pytest.raises(
                StateError, match=r"model\.0 \(Scale\) was made on the meta device and has no reset_par"
            ):
                first_values(made)


def test_a_draw_of_another_shape_is_left_to_torch():
    """Only tensors of the DTensor's shape are taken from the whole; all others are as without the mode."""
    with fake_world(1, 2) as mesh, WholeDraws():
        sharded_one = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)], src_data_rank=None)
        torch.manual_seed(0)
        drawn = torch.randn_like(sharded_one)
        torch.manual_seed(0)
        assert torch.equal(drawn.to_local(), torch.randn(6, 2)[3:])
        assert torch.rand(2).shape == (2,)


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_an_operation_that_gives_two_tensors_is_left_to_torch():
    """Dropout's values and its mask are not parts of one tensor."""
    with fake_world(1, 2) as mesh, WholeDraws():
        kept, mask = torch.native_dropout(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]), 0.5, True)
        assert (local_tensor(kept).shape, local_tensor(mask).shape) == ((2, 2), (2, 2))


def test_a_draw_from_probabilities_reads_them():
    """Zeros give zeros, and ones give ones."""
    with fake_world(0, 1) as mesh, WholeDraws():
        wanted = torch.eye(8)
        drawn = torch.bernoulli(distribute_tensor(wanted, mesh, [Shard(0)]))
        assert torch.equal(local_tensor(drawn), wanted)
