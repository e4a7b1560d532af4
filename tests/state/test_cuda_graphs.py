"""CUDA graphs in a training: those with an optimizer's step are refused in words, others are not felt."""

import pytest
import torch
from torch import nn

from nbelastic import StateError, TorchState
from nbelastic.state.cuda_graphs import SAMPLES
from tests.state.training import network, step


@pytest.fixture
def replay(monkeypatch):
    """`replay(change)`: replay a graph that was captured earlier; its kernels do what `change()` does."""
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda change: change())

    def call(change):
        torch.cuda.CUDAGraph.replay(change)

    return call


def test_a_step_that_is_captured_in_the_loop_is_refused(group, begun, monkeypatch):
    """The hook would wait for the GPU, which a capture does not permit: the error says what to capture instead."""
    model, optimizer = network()
    begun(TorchState(model=model, optimizer=optimizer))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(StateError, match="Capture the forward and backward pass only"):
        step(model, optimizer)
    monkeypatch.undo()


def test_a_step_that_was_captured_before_the_loop_is_refused_at_the_commit(group, begun, replay):
    """No hook runs and no count changes, but the parameters do."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    step(model, optimizer)
    state.commit()

    def kernels():
        model.weight.data.add_(1)

    replay(kernels)
    with pytest.raises(StateError, match="in a CUDA graph cannot be recovered"):
        state.commit()


def test_a_captured_step_is_noticed_behind_layers_that_it_does_not_change(group, begun, replay):
    """A few parameters are compared, but no frozen ones, and none in another memory format."""
    frozen = [nn.Linear(1, 1).requires_grad_(False) for _ in range(SAMPLES)]
    model = nn.Sequential(*frozen, nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last), nn.Linear(1, 1))
    state = begun(TorchState(model=model))
    replay(lambda: model[-1].weight.data.add_(1))
    with pytest.raises(StateError, match="in a CUDA graph cannot be recovered"):
        state.commit()


def test_graphs_of_forward_and_backward_are_not_felt(group, begun, replay):
    """Replays that change no parameter may be anywhere."""
    model, optimizer = network()
    original = torch.cuda.CUDAGraph.replay
    state = begun(TorchState(model=model, optimizer=optimizer))
    replay(lambda: None)
    step(model, optimizer)
    state.commit()
    replay(lambda: None)
    state.commit()
    assert state.commits == 2
    state.end()
    assert torch.cuda.CUDAGraph.replay is original
