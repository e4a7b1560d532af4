"""What a layer keeps beside parameters and buffers (`get_extra_state`) is part of the state, as of torch's `state_dict()`."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from nbelastic import StateError, TorchState
from nbelastic.sharded.parameters import plain_name
from nbelastic.state import checkpoints as saving
from nbelastic.state.extra_states import ExtraStates
from nbelastic.state.takeover import initial_values, take_over
from tests.state.kept import write
from tests.state.training import receive


class Scaled(nn.Linear):
    """It counts its calls, and keeps a scale, in plain attributes."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls, self.scale = 0, torch.ones(1)

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.scale

    def get_extra_state(self):
        return {"calls": self.calls, "scale": self.scale}

    def set_extra_state(self, state):
        self.calls, self.scale = state["calls"], state["scale"]


def made(calls=0):
    state = TorchState(model=nn.Sequential(nn.Linear(2, 2), Scaled()))
    state.model[1].calls = calls
    state.commit()
    return state


def test_a_break_returns_to_the_commit(begun):
    """A tensor in it is a copy: a change in place does not reach the commit."""
    state = begun(made(5))
    state.model(torch.ones(1, 2))
    state.model[1].scale *= 2
    for _ in range(2):
        state.generation_ended(aborted=True)
        assert (state.model[1].calls, state.model[1].scale.item()) == (5, 1.0)
        state.model[1].scale *= 2


def test_a_layer_that_cannot_take_it_back_is_left_alone(begun):
    """It defines only `get_extra_state`, or only the inverse: a break neither fails nor calls that."""

    class Telling(nn.Linear):
        def get_extra_state(self):
            pytest.fail("it was called")

    class Told(nn.Linear):
        def set_extra_state(self, _):
            pytest.fail("it was called")

    state = begun(TorchState(model=nn.Sequential(Telling(2, 2), Told(2, 2))))
    state.generation_ended(aborted=True)
    assert state.clean


def test_a_newcomer_receives_it():
    """Its tensors come into new memory, as do other small values."""
    sender, newcomer = made(7), made()
    sender.model[1].scale = torch.full((3,), 0.5)
    sender.commit()
    receive(newcomer, sender)
    assert newcomer.model[1].calls == 7
    assert newcomer.model[1].scale.tolist() == [0.5] * 3


@pytest.fixture
def saved(tmp_path):
    write(made(9), tmp_path)
    yield tmp_path
    saving._join_last()


def test_a_checkpoint_has_it(saved):
    state = made()
    saving.load(state, saved)
    assert state.model[1].calls == 9


def test_a_checkpoint_of_an_older_version_leaves_it(tmp_path, monkeypatch):
    old, state = made(9), made(3)
    live = old._live()
    del live["extra"]
    monkeypatch.setattr(old, "_live", lambda: live)
    write(old, tmp_path)
    saving.load(state, tmp_path)
    saving._join_last()
    assert state.model[1].calls == 3


def test_a_new_program_goes_on_with_it():
    old, new = made(4), made()
    base = initial_values(old)
    take_over(new, old, base, initial_values(new))
    assert new.model[1].calls == 4


def test_a_sharded_model_finds_it_also_if_its_layers_are_wrapped_now():
    """A commit of a program that did not checkpoint activations, or compile, has the same names."""
    plain, other = (nn.Sequential(nn.Linear(2, 2), Scaled()) for _ in range(2))
    plain[1].calls, layer = 4, other[1]
    other[1] = checkpoint_wrapper(layer)
    ExtraStates({"model": checkpoint_wrapper(other)}, plain_name).set(ExtraStates({"model": plain}, plain_name).copy())
    assert layer.calls == 4


def test_what_is_not_plain_data_is_refused_at_the_start(begun):
    """The job fails in words, and not at its first newcomer."""
    state = made()
    state.model[1].calls = object()
    with pytest.raises(StateError, match="something that is not plain data"):
        begun(state)
