"""Buffers that a forward pass makes or enlarges, as masks and rotary tables: a newcomer's model has not made them yet."""

import pytest
import torch
from torch import nn

from nbelastic import StateError, TorchState
from nbelastic.state import checkpoints as saving
from tests.state.kept import write
from tests.state.training import receive


class Cached(nn.Module):
    """`table` grows with the input, and `mean` is made by the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.register_buffer("mean", None)

    def forward(self, x):
        if len(x) > len(self.table):
            self.register_buffer("table", torch.arange(len(x)), persistent=False)
        if self.mean is None:
            self.mean = x.mean()
        return self.layer(x)


def made(*lengths):
    state = TorchState(model=nn.Sequential(Cached()))
    for length in lengths:
        state.model(torch.full((length, 1), 2.0))
    state.commit()
    return state


def caches(state):
    return state.model[0].table.tolist(), None if state.model[0].mean is None else state.model[0].mean.item()


@pytest.mark.parametrize("mine", [(), (2,), (5,)])
def test_a_newcomer_receives_them(mine):
    """Whatever its own model has made; it ended the job."""
    sender, newcomer = made(3), made(*mine)
    receive(newcomer, sender)
    assert caches(newcomer) == ([0, 1, 2], 2.0)
    newcomer.model(torch.ones(1, 1))
    newcomer.restore()
    assert caches(newcomer) == ([0, 1, 2], 2.0)


def test_what_is_not_saved_may_be_absent():
    """The sender's model has thrown its table away."""
    sender, newcomer = made(3), made(4)
    sender.model[0].table = None
    receive(newcomer, sender)
    assert newcomer.model[0].table is None


def test_a_buffer_of_two_layers_stays_in_both():
    """A model names it once: its other name does not look as if the sender had thrown it away."""
    states = [TorchState(model=nn.Sequential(Cached(), Cached())) for _ in range(2)]
    for state in states:
        state.model[1].table = state.model[0].table
        state.commit()
    states[0].model[0].table.fill_(7)
    receive(states[1], states[0])
    first, second = states[1].model
    assert second.table is first.table
    assert second.table.tolist() == [7]


def test_a_checkpoint_has_them(tmp_path):
    write(made(3), tmp_path)
    state = made()
    saving.load(state, tmp_path)
    saving._join_last()
    assert caches(state) == ([0, 1, 2], 2.0)


def test_a_saved_buffer_of_another_shape_is_another_model():
    sender, newcomer = made(3), made(3)
    newcomer.model[0].mean = torch.zeros(2)
    with pytest.raises(StateError, match=r"model\.0\.mean is .*2,.* here and .* in the received state"):
        receive(newcomer, sender)
    assert newcomer.model[0].mean.tolist() == [0, 0]


def test_a_break_returns_to_those_of_the_commit(begun):
    """Also to none: what was made after it would be summed up a second time."""
    state = begun(made())
    state.model[0].register_buffer("late", torch.ones(1))
    state.model(torch.ones(4, 1))
    state.generation_ended(aborted=True)
    assert caches(state) == ([0], None)
    assert not hasattr(state.model[0], "late")


def test_a_break_returns_to_their_size(begun):
    """A forward pass may also enlarge one in place, and a program its weights: what is then copied back has another shape."""
    state = begun(made())
    layer = state.model[0]
    layer.table.resize_(4)
    layer.layer.weight.data = torch.ones(2, 1, dtype=torch.float64)
    state.generation_ended(aborted=True)
    assert caches(state) == ([0], None)
    assert (layer.layer.weight.shape, layer.layer.weight.dtype) == ((1, 1), torch.float32)
