"""Changes of a model or an optimizer during a job, and what a state refuses, each by name."""

import warnings

import pytest
import torch
from torch import nn

from nbelastic import ObjectState, StateError, TorchState
from tests.state.training import receive


def network(seed=1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


# ---- parameters that are added or replaced ----


def test_a_parameter_that_is_added_is_tracked_from_the_next_commit_on(begun):
    """The changes of an added parameter without an optimizer, as in LoRA, are noticed and undone."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    for _ in range(2):
        step(model, optimizer)
        step(model, optimizer)
        state.commit()
    model[0].scale = nn.Parameter(torch.ones(3))
    assert not state.clean
    state.commit()
    assert state.clean
    with torch.no_grad():
        model[0].scale.mul_(2)
    assert not state.clean
    state.restore()
    assert model[0].scale.tolist() == [1, 1, 1]


def test_a_layer_that_is_replaced_is_sent_to_newcomers(begun):
    """The state holds the model's present layers; the error names the layer that differs at a newcomer."""
    model, _ = network()
    state = begun(TorchState(model=model))
    state.commit()
    model[1] = nn.Linear(4, 5)
    state.commit()
    model_2, _ = network(2)
    newcomer = begun(TorchState(model=model_2))
    with pytest.raises(StateError, match=r"model\.1\.weight is .*3, 4.* here and .*5, 4.* in the received state"):
        receive(newcomer, state)
    model_2[1] = nn.Linear(4, 5)
    receive(newcomer, state)
    assert torch.equal(model_2[1].weight, model[1].weight)
    assert newcomer.clean


def test_a_replaced_layer_that_the_optimizer_does_not_know_is_refused(begun):
    """The optimizer still trains the old layer: the next commit raises."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    model[1] = nn.Linear(4, 3)
    with pytest.raises(StateError, match="optimizer trains 2 parameters of no model in the state"):
        state.commit()


def test_a_layer_of_torchscript_is_a_part_of_the_state(begun):
    """It gives out new dictionaries of its parameters at each access. Its changes are undone, and a layer beside it is noticed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 3))
    state = begun(TorchState(model=model))
    assert state.clean
    with torch.no_grad():
        model[0].weight.zero_()
    state.restore()
    assert model[0].weight.any()
    model[1].scale = nn.Parameter(torch.ones(3))
    assert not state.clean


def test_buffers_and_gradients_are_not_new_layers(begun):
    """Changes of buffers and gradients do not count as a change of the model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = begun(TorchState(model=model, optimizer=optimizer))
    step(model, optimizer)
    model[1].running_mean = torch.zeros(4)
    assert not state._contents.layout.changed()


def tie(model):
    model[1].weight = model[0].weight


def tie_again(model):
    """The weight then comes last among the parameters of its layer."""
    del model[1].weight
    model[1].weight = model[0].weight


def name_again(model):
    model.extra = model[0]
    model[1].other = model[0].bias


@pytest.mark.parametrize("alias", [tie, tie_again, name_again])
def test_another_name_for_a_parameter_is_not_a_new_layer(begun, alias):
    """A second name for a parameter, as with tied weights, does not change the state."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tie(model)
    state = begun(TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    state.commit()
    alias(model)
    assert state.clean
    model[0].bias = nn.Parameter(torch.ones(4))
    assert not state.clean


def swap(model):
    model[0], model[1] = model[1], model[0]


def replace_one_of_two_names(model):
    model[1].weight = nn.Parameter(model[0].weight.detach())


def take_away(model):
    del model[1].bias


def take_away_a_layer(model):
    del model[1]


def write_without_setattr(model):
    model[1]._parameters["bias"] = nn.Parameter(torch.ones(4))


def give_a_leaf_a_layer(model):
    model[0].adapter = nn.Linear(2, 2)


def give_a_leaf_a_layer_without_parameters(model):
    model[0].norm = nn.BatchNorm1d(4, affine=False)


@pytest.mark.parametrize(
    "change",
    [
        swap,
        replace_one_of_two_names,
        take_away,
        take_away_a_layer,
        write_without_setattr,
        give_a_leaf_a_layer,
        give_a_leaf_a_layer_without_parameters,
    ],
)
def test_every_change_of_a_model_is_noticed(begun, change):
    """After any change the last commit holds the earlier model, and the next commit holds the present one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tie(model)
    state = begun(TorchState(model=model))
    state.commit()
    change(model)
    assert not state.clean
    state.commit()
    assert state.clean


# ---- optimizers ----


class Counting(torch.optim.SGD):
    """It keeps values under its own keys, beside those of each parameter."""

    def step(self, closure=None):
        super().step(closure)
        self.state["steps"] = self.state.get("steps", 0) + 1
        self.state.setdefault("global", {"sum": torch.zeros(1)})["sum"] += 1


def counting(seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    return model, Counting(model.parameters(), lr=0.1)


def test_values_under_an_optimizer_s_own_keys_are_sent(begun):
    """A newcomer's optimizer receives the values that the sender's optimizer keeps under its own keys."""
    (model, optimizer), (mine, fresh) = counting(1), counting(2)
    old = begun(TorchState(model=model, optimizer=optimizer))
    for _ in range(3):
        step(model, optimizer)
    old.commit()
    fresh.state["odd"] = 1
    new = begun(TorchState(model=mine, optimizer=fresh))
    receive(new, old)
    assert (fresh.state["steps"], fresh.state["global"]["sum"].item(), "odd" in fresh.state) == (3, 3, False)
    step(model, optimizer)
    assert fresh.state["global"]["sum"].item() == 3


def test_values_under_an_optimizer_s_own_keys_are_restored(begun):
    """A restore from copies also restores values that an optimizer keeps under its own keys."""
    model, optimizer = counting(1)
    state = begun(TorchState(model=model, optimizer=optimizer))
    for _ in range(2):
        step(model, optimizer)
    state.commit()
    step(model, optimizer)
    state.restore()
    assert (optimizer.state["steps"], optimizer.state["global"]["sum"].item()) == (2, 2)


# ---- accumulated gradients ----


class Experts(nn.Module):
    """A forward pass uses one of two experts, and neither holds the first or the last parameter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        self.last = nn.Linear(3, 3)

    def forward(self, x, which):
        return self.experts[which](x)


def test_ranks_that_use_other_parameters_count_the_same_commits(begun):
    """The same calls count as commits on all ranks, although their samples reach different parameters."""
    counts = []
    for used in (0, 1):
        torch.manual_seed(1)
        model = Experts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = begun(TorchState(model=model, optimizer=optimizer))
        for number in range(6):
            model(torch.ones(2, 4), used).sum().backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
            state.commit()
        counts.append(state.commits)
        state.end()
    assert counts == [2, 2]


def test_no_backward_pass_is_watched_after_the_job(begun):
    """When the last state has ended, torch's own function for backward passes is back."""
    plain = torch.autograd.backward
    model, optimizer = network()
    states = [begun(TorchState(model=model, optimizer=optimizer)) for _ in range(2)]
    assert torch.autograd.backward is not plain
    for state in states:
        state.end()
    assert torch.autograd.backward is plain


# ---- what is refused ----


class StatefulDataLoader:
    """As in torchdata."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """As in torch.distributed.optim, where it needs a process group."""


class FullyShardedDataParallel(nn.Module):
    """As in torch.distributed.fsdp, where it needs a process group."""


def managed():
    """A layer inside such a module, which it marks."""
    model = nn.Linear(2, 2)
    model._is_fsdp_managed_module = True
    return model


class Sharded(torch.Tensor):
    """Like a DTensor."""

    device_mesh = None


def sharded():
    model = nn.Linear(2, 2)
    model._parameters["weight"] = nn.Parameter(model.weight.detach().as_subclass(Sharded))
    return model


def graph():
    """As graph networks keep their edges."""
    layer = nn.Linear(2, 2)
    layer.register_buffer("edges", torch.eye(2).to_sparse(), persistent=False)
    return nn.Sequential(layer)


Metric = type("Metric", (nn.Module,), {"__module__": "torchmetrics.metric"})


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (type("Accuracy", (Metric,), {}), r"thing is a metric of torchmetrics.*the results of compute\(\)"),
        (torch.Generator, r"thing is a torch.Generator: give its get_state\(\)"),
        (StatefulDataLoader, "thing is a StatefulDataLoader.*use nbe.ElasticSampler"),
        (lambda: ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), lr=1), "thing is ZeroRedundancyOptimizer"),
        (sharded, "thing is sharded over ranks.*Use DistributedDataParallel"),
        (FullyShardedDataParallel, "thing is sharded over ranks.*Use DistributedDataParallel"),
        (managed, "thing is sharded over ranks.*Use DistributedDataParallel"),
        (graph, r"thing\.0\.edges is not a dense tensor \(torch\.sparse_coo\).*a plain attribute \(self\.edges"),
    ],
    ids=["metric", "generator", "loader", "zero", "sharded", "fsdp", "inside fsdp", "sparse"],
)
def test_what_cannot_be_recovered_is_refused_by_name(make, line):
    """The constructor raises, with one line that names an alternative."""
    with pytest.raises(StateError, match=line) as refused:
        ObjectState(thing=make())
    assert "\n" not in str(refused.value)


def test_a_model_that_is_sharded_inside_the_function_is_refused_at_the_commit(begun):
    """fully_shard replaces the parameters without a call of the module's methods."""
    model, _ = network()
    state = begun(TorchState(model=model))
    model[0]._parameters["weight"] = nn.Parameter(model[0].weight.detach().as_subclass(Sharded))
    with pytest.raises(StateError, match="model is sharded over ranks"):
        state.commit()


def test_moments_that_are_not_plain_tensors_are_refused(begun):
    """After a step that made moments of a tensor subclass, as 8-bit optimizers do, the commit raises."""

    class Small(torch.Tensor):
        pass

    class EightBit(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p]["moment"] = torch.zeros(2).as_subclass(Small)

    model = nn.Linear(4, 3)
    optimizer = EightBit(model.parameters(), lr=0.1)
    state = begun(TorchState(model=model, optimizer=optimizer))
    state.commit()
    step(model, optimizer)
    with pytest.raises(StateError, match="optimizer keeps Small instead of plain tensors"):
        state.commit()


def test_a_tensor_of_the_graph_is_refused_by_name(begun):
    """`state.loss = loss` would keep the whole graph in memory: the error asks for `detach()`."""
    state = begun(ObjectState(losses=[]))
    state.losses = [torch.ones(1, requires_grad=True) * 2]
    with pytest.raises(StateError, match=r"losses holds a tensor .* give its detach\(\)"):
        state.commit()


def test_buffers_that_nothing_can_be_written_into_are_restored_and_received(begun):
    """A mask of expand(), and a table that an evaluation has made in inference mode: the model gets copies to write into."""

    def made(start):
        model = nn.Linear(2, 2)
        model.register_buffer("mask", torch.full((1,), start).expand(4))
        model.register_buffer("table", torch.zeros(3))
        return TorchState(model=model)

    state, newcomer = begun(made(5.0)), made(0.0)
    with torch.inference_mode():
        state.model.table = torch.ones(3)
        newcomer.model.table = torch.zeros(3)
    state.commit()
    mask = state.model.mask
    state.model.table.add_(1)
    state.undo()
    receive(newcomer, state)
    state.commit()
    assert state.model.mask is mask
    for model in (state.model, newcomer.model):
        assert (model.mask.tolist(), model.table.tolist()) == ([5, 5, 5, 5], [1, 1, 1])
