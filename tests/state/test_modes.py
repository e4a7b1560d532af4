"""Each call of the function begins with the modes (train or eval) that the layers had at first."""

import pytest
import torch

from nbelastic import TorchState


@pytest.fixture
def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def modes(model):
    return [layer.training for layer in model.modules()]


@pytest.mark.parametrize("aborted", [True, False], ids=["a break", "a planned change"])
def test_each_call_begins_with_the_modes_of_the_first(begun, model, aborted):
    """As on a newcomer: an evaluation that did not end leaves no layer in eval mode, also at a commit at which ranks leave."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model[1].eval()
    state = begun(TorchState(model=model, optimizer=optimizer))
    model.add_module("head", torch.nn.Dropout())
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()
    state.commit()
    model.eval()
    state.commit()
    state.generation_ended(aborted=aborted)
    assert modes(model) == [True, True, False, True, True]


def test_modes_that_a_framework_sets_stay(begun, model):
    """Lightning goes on within an epoch, where its hooks have set the modes of some layers."""
    state = begun(TorchState(model=model))
    state._modes.are_kept = False
    model[1].eval()
    state.generation_ended(aborted=True)
    assert modes(model) == [True, True, False, True]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_layer_that_torchscript_has_frozen_has_no_mode(begun):
    """A model may use one, such as a frozen encoder: the modes of the others are kept."""
    encoder = torch.jit.freeze(torch.jit.script(torch.nn.Linear(4, 4).eval()))
    model = torch.nn.Sequential(encoder, torch.nn.Linear(4, 2))
    state = begun(TorchState(model=model))
    model[1].eval()
    state.generation_ended(aborted=True)
    assert model[1].training
