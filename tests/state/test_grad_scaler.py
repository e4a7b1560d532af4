"""GradScaler in a state: commits do not wait for the GPU, and an aborted step leaves no half of itself behind."""

import pytest
import torch

from nbelastic import TorchState
from tests.state.training import network


class Aborted(RuntimeError):
    pass


@pytest.fixture
def training(begun):
    """A model, its optimizer, a scaler in its second interval, and the state."""
    model, _ = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    state = begun(TorchState(model=model, optimizer=optimizer, scaler=scaler))
    return model, optimizer, scaler, state


def step(model, optimizer, scaler):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def abort(*_):
    raise Aborted


def test_a_commit_reads_no_number_from_the_gpu(training, monkeypatch):
    """`GradScaler.state_dict()` waits for the GPU; commits copy its tensors instead."""
    model, optimizer, scaler, state = training
    step(model, optimizer, scaler)
    monkeypatch.setattr(torch.amp.GradScaler, "state_dict", lambda _: pytest.fail("it waits for the GPU"))
    state.commit()


def test_a_restore_returns_to_the_scale_of_the_commit(training):
    """Scale, growth and options are those of the commit, also before the first step has made them."""
    model, optimizer, scaler, state = training
    step(model, optimizer, scaler)
    state.undo()
    assert (scaler._scale, scaler.get_scale()) == (None, 1024.0)
    step(model, optimizer, scaler)
    state.commit()
    before, scale = scaler.state_dict(), scaler._scale
    scaler.scale(torch.ones(1))
    scaler.update(5.0)
    scaler.set_growth_factor(4.0)
    state.restore()
    assert scaler.state_dict() == before
    assert scaler._scale is scale


def test_a_scaler_that_is_switched_off(begun):
    """`GradScaler(enabled=False)` has no scale: it is committed and restored as any object, and passes steps on."""
    model, optimizer = network()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    state = begun(TorchState(model=model, optimizer=optimizer, scaler=scaler))
    step(model, optimizer, scaler)
    state.commit()
    state.restore()
    assert (state.commits, state.scaler) == (1, scaler)


def test_after_an_aborted_step_gradients_are_unscaled_again(training):
    """The abort comes after `unscale_`, in the optimizer's hook: the next step must not take its gradients for unscaled."""
    model, optimizer, scaler, state = training
    step(model, optimizer, scaler)
    state.commit()
    hook = optimizer.register_step_pre_hook(abort)
    with pytest.raises(Aborted):
        step(model, optimizer, scaler)
    hook.remove()
    state.generation_ended(aborted=True)
    before = model.bias.detach().clone()
    step(model, optimizer, scaler)
    assert torch.allclose(before - model.bias, torch.full_like(before, 0.3))


def test_after_an_aborted_step_a_fused_optimizer_divides_by_the_scale_once(begun):
    """The scaler gives it the scale for one step, and takes it away after that: an aborted step must not leave it."""
    model, _ = network()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = begun(TorchState(model=model, optimizer=optimizer, scaler=scaler))
    hook = optimizer.register_step_pre_hook(abort)
    with pytest.raises(Aborted):
        step(model, optimizer, scaler)
    hook.remove()
    state.generation_ended(aborted=True)
    step(model, optimizer, scaler)
    average = optimizer.state[model.bias]["exp_avg"]
    assert torch.allclose(average, torch.full_like(average, 0.3))


def test_a_learning_rate_tensor_stays_the_same_object(begun):
    """A CUDA graph reads the tensor that it was captured with. One of another shape is replaced."""
    model, _ = network()
    lr = torch.tensor(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    state = begun(TorchState(model=model, optimizer=optimizer))
    state.commit()
    lr.fill_(0.5)
    state.undo()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.1)
    optimizer.param_groups[0]["lr"] = torch.full((1,), 0.5)
    state.undo()
    assert optimizer.param_groups[0]["lr"].shape == ()
