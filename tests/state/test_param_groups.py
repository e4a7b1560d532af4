"""An optimizer's parameter groups and own values: what a commit records, restores and sends."""

import copy

import pytest
import torch
from torch import nn

from nbelastic import StateError, TorchState
from nbelastic.state import optimizers
from tests.state.training import network, receive, step, unfreezing, weights


def test_an_optimizers_tensors_are_recorded_without_a_copy():
    """The record refers to the optimizer's own tensors, and copies all other values."""
    model, optimizer = network()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    kept = optimizer.state[model.weight]
    kept["seen"] = {"tensor": torch.ones(1), "steps": [1]}
    recorded = optimizers.entries(optimizer)
    tensors = kept["momentum_buffer"], kept["seen"]["tensor"]
    kept["seen"]["steps"].append(2)
    optimizer.state.clear()
    optimizers.set_entries(optimizer, recorded)
    found = optimizer.state[model.weight]
    assert found["momentum_buffer"] is tensors[0]
    assert found["seen"]["tensor"] is tensors[1]
    assert found["seen"]["steps"] == [1]


def test_groups_added_after_the_commit_are_removed(group, begun):
    """A restore removes a parameter group that was added after the commit, for example by a late unfreeze."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    state = begun(TorchState(model=model, optimizer=optimizer))
    step(model, optimizer)
    state.commit()
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    state.restore()
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    step(model, optimizer)
    state.commit()
    state.restore()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]


def add_a_parameter(optimizer, layer):
    optimizer.param_groups[0]["params"].append(layer.weight)


def remove_a_group(optimizer, _):
    del optimizer.param_groups[0]


def load_its_state(optimizer, _):
    """As it was with other values."""
    values = copy.deepcopy(optimizer.state_dict())
    for entry in values["state"].values():
        entry["momentum_buffer"].zero_()
    values["param_groups"][0]["lr"] = 7.0
    optimizer.load_state_dict(values)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("change", [add_a_parameter, remove_a_group, load_its_state])
def test_groups_that_change_after_the_commit_are_as_they_were(group, begun, change, steps):
    """A restore undoes it, so that the next steps are the same. After two steps without a commit all is copied."""
    results = []
    for disturbed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(model[1:], (0.1, 0.2), strict=True)]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        state = begun(TorchState(model=model, optimizer=optimizer))
        for _ in range(steps):
            step(model, optimizer)
        state.commit()
        if disturbed:
            change(optimizer, model[0])
            state.restore()
        step(model, optimizer)
        results.append(weights(model))
    assert results[0] == results[1]


def test_a_group_that_a_checkpoint_lacks_is_named(tmp_path, capsys):
    """The program was changed since: the parameters of its new group are not trained, and a line says so."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    state = TorchState(model=model, optimizer=optimizer)
    path = state.save(tmp_path).wait()
    optimizer.add_param_group({"params": list(model[0].parameters())})
    state.load(tmp_path)
    assert len(optimizer.param_groups) == 1
    line = f"nbelastic: optimizer does not train model.0.weight and 1 more: it has no such group in {path.name}."
    assert line in capsys.readouterr().err.splitlines()


def test_a_newcomer_gets_the_groups_that_were_added(group, begun):
    """The newcomer's optimizer lacks the added group, and makes it from its own parameters, by name."""
    (model, optimizer), (mine, fresh) = unfreezing(1), unfreezing(2)
    old = begun(TorchState(model=model, optimizer=optimizer))
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    step(model, optimizer)
    old.commit()
    new = begun(TorchState(model=mine, optimizer=fresh))
    receive(new, old)
    assert weights(mine) == weights(model)
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.01]
    step(model, optimizer)
    step(mine, fresh)
    assert weights(mine) == weights(model)
    assert new.commits == 1


def test_other_groups_are_refused_and_nothing_is_changed(group, begun):
    """An optimizer with the same parameters in another order is refused, and nothing changes."""
    (model, optimizer), (mine, _) = unfreezing(1), unfreezing(2)
    old = begun(TorchState(model=model, optimizer=optimizer))
    other = torch.optim.Adam([{"params": [mine[1].bias]}, {"params": [mine[1].weight]}])
    new = begun(TorchState(model=mine, optimizer=other))
    before = weights(mine)
    with pytest.raises(StateError, match="have other parameters here"):
        receive(new, old)
    assert (weights(mine), len(other.param_groups)) == (before, 2)


def test_groups_of_which_only_one_differs_are_refused(group, begun):
    """Each group is compared: momentum of one parameter never reaches another."""

    def grouped(seed, order):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        first, second = ([layer.weight, layer.bias] for layer in model)
        return model, torch.optim.Adam([{"params": first}, {"params": second[::order]}])

    (model, optimizer), (mine, other) = grouped(1, 1), grouped(2, -1)
    old, new = (begun(TorchState(model=m, optimizer=o)) for m, o in ((model, optimizer), (mine, other)))
    before = weights(mine)
    with pytest.raises(StateError, match="have other parameters here"):
        receive(new, old)
    assert weights(mine) == before


def test_an_optimizer_needs_its_model(group, begun):
    """Parameters that are in no model of the state could not be recovered: the constructor refuses them."""
    _, optimizer = network()
    with pytest.raises(StateError, match="optimizer trains 2 parameters of no model in the state"):
        TorchState(optimizer=optimizer)


def test_a_group_of_a_model_outside_the_state_is_refused_at_the_next_commit(begun):
    """A program may add one at any time."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(StateError, match="optimizer trains 1 parameters of no model in the state"):
        state.commit()


def test_a_single_parameter(group, begun):
    """A single nn.Parameter in the state stays the object that the optimizer holds."""
    scale = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([scale], lr=0.5)
    state = begun(TorchState(scale=scale, optimizer=optimizer))
    for _ in range(2):
        for _ in range(2):
            (scale * 1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state.commit()
    with torch.no_grad():
        scale.fill_(7)
    state.restore()
    assert (state.scale is scale, scale.item()) == (True, -1.0)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_an_optimizer_of_another_class_is_refused(tmp_path, kind):
    """It would take over the learning rate and the entries, and fail at its first step or begin without momentum."""
    model, optimizer = network()
    saved = TorchState(model=model, optimizer=optimizer)
    saved.save(tmp_path).wait()
    other = TorchState(model=model, optimizer=kind(model.parameters(), lr=0.5))
    if kind is torch.optim.SGD:
        other.load(tmp_path)
        return
    with pytest.raises(StateError, match="the class of optimizer is Adam here and SGD in the received state"):
        other.load(tmp_path)
    assert other.optimizer.param_groups[0]["lr"] == 0.5
