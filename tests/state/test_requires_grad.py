"""Which parameters are trained is part of the state: for newcomers, after a break, in checkpoints and for new programs."""

import pytest
import torch
from torch import nn

from nbelastic import TorchState
from nbelastic.state import checkpoint_files as checkpoint
from nbelastic.state import checkpoints as saving
from nbelastic.state.takeover import initial_values, take_over
from tests.state.kept import write
from tests.state.training import receive


@pytest.fixture(autouse=True)
def nothing_under_way():
    yield
    saving._join_last()


def fine_tuning(*frozen):
    """A state of two layers; those with these numbers are frozen."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    for number in frozen:
        model[number].requires_grad_(False)
    return TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def unfrozen():
    """A state whose function has unfrozen the first layer."""
    state = fine_tuning(0)
    state.model[0].requires_grad_(True)
    state.commit()
    return state


def trained(state):
    """For each layer whether it is trained."""
    return [layer.weight.requires_grad and layer.bias.requires_grad for layer in state.model]


def test_a_newcomer_trains_the_layers_that_the_others_train():
    """It has never run the line that unfreezes a layer, or freezes one: DDP aborts if ranks train different parameters."""
    state = fine_tuning(0)
    receive(state, unfrozen())
    assert trained(state) == [True, True]
    receive(state, fine_tuning(1))
    assert trained(state) == [True, False]


def test_a_break_returns_to_the_layers_of_the_commit(begun):
    """One rank has unfrozen a layer when the world breaks, and another has not yet: both call the function with it frozen."""
    state = begun(fine_tuning(0))
    state.model[0].requires_grad_(True)
    state.generation_ended(aborted=True)
    assert trained(state) == [False, True]
    state.model[0].requires_grad_(True)
    state.commit()
    state.generation_ended(aborted=True)
    assert trained(state) == [True, True]


def test_a_job_goes_on_from_a_checkpoint_with_its_layers(tmp_path, capsys):
    """One line says that the program has set it in another way."""
    write(unfrozen(), tmp_path)
    state = fine_tuning(0)
    path = saving.load(state, tmp_path)
    assert trained(state) == [True, True]
    line = f"nbelastic: requires_grad of model.0.weight and of 1 more is as in {path.name}, and not as the program has set it."
    assert capsys.readouterr().err.splitlines() == [line]
    saving.load(state, tmp_path)
    assert capsys.readouterr().err == ""


def test_a_line_about_one_parameter_speaks_of_no_others(tmp_path, capsys):
    """Only the bias of a layer was unfrozen, and only a weight is in the group that the checkpoint lacks."""
    saved, state = fine_tuning(0), fine_tuning(0)
    saved.model[0].bias.requires_grad_(True)
    del saved.optimizer.param_groups[0]["params"][0]
    path = write(saved, tmp_path)
    weight = state.optimizer.param_groups[0]["params"].pop(0)
    state.optimizer.add_param_group({"params": [weight]})
    saving.load(state, tmp_path)
    assert capsys.readouterr().err.splitlines() == [
        f"nbelastic: requires_grad of model.0.bias is as in {path.name}, and not as the program has set it.",
        f"nbelastic: optimizer does not train model.0.weight: it has no such group in {path.name}.",
    ]


def test_a_checkpoint_of_an_older_version_leaves_the_layers_as_they_are(tmp_path, monkeypatch):
    state = unfrozen()
    live = state._live()
    del live["requires_grad"]
    monkeypatch.setattr(state, "_live", lambda: live)
    write(state, tmp_path)
    other = fine_tuning(0)
    saving.load(other, tmp_path)
    assert trained(other) == [False, True]
    assert checkpoint.listed(tmp_path)


def test_a_new_program_trains_the_layers_of_the_old_one_unless_the_user_has_edited_that():
    base = initial_values(fine_tuning(0))
    new = fine_tuning(0)
    assert take_over(new, unfrozen(), base, initial_values(new)).notes == []
    assert trained(new) == [True, True]
    edited = fine_tuning(0, 1)
    (note,) = take_over(edited, unfrozen(), base, initial_values(edited)).notes
    assert trained(edited) == [True, False]
    assert note == "the new program sets requires_grad.model.1.weight, requires_grad.model.1.bias"
