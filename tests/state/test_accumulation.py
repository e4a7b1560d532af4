"""Commits without an optimizer step: while gradients accumulate, at the end of an epoch, after a skipped step."""

import pytest
import torch

from nbelastic import TorchState
from nbelastic.state.backward_hooks import BackwardHook
from nbelastic.worker.interrupts import WorldAborted
from tests.state.training import backward, copies, network, step


def test_commits_while_gradients_accumulate_wait_for_the_step(group, begun):
    """A half-summed gradient cannot be restored: its samples would count as used, and their gradients would be lost."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer, seen=0))
    for micro in range(8):
        backward(model)
        state.seen += 1
        if micro % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        state.commit()
    assert state.commits == 2
    backward(model)
    state.seen += 1
    state.commit()
    state.restore()
    assert (state.commits, state.seen) == (2, 8)


def test_a_commit_waits_also_if_some_parameters_have_no_gradient(group, begun):
    """They are frozen, or the pass did not reach them: the gradients of the others are half a sum."""
    model, optimizer = network()
    model.bias.requires_grad_(False)
    state = begun(TorchState(model=model, optimizer=optimizer))
    backward(model)
    state.commit()
    assert state.commits == 0


def test_commits_without_a_step_count(group, begun):
    """For example at the end of an epoch: counters are recorded, whether gradients of the last step exist or not."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer, epoch=0))
    step(model, optimizer)
    state.commit()
    state.epoch = 1
    state.commit()
    state.epoch = 2
    state.restore()
    assert (state.commits, state.epoch) == (2, 1)


def test_gradients_that_were_thrown_away_do_not_hold_up_a_commit(group, begun):
    """A skipped batch: no optimizer step, and the gradients are set to None."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    backward(model)
    optimizer.zero_grad()
    state.commit()
    assert state.commits == 1


def test_a_second_loop_does_not_wait_for_the_gradients_that_a_step_has_used(group, begun):
    """The first loop ended without a commit after its last step, and the gradients are still there."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    step(model, optimizer)
    begun(state).commit()
    assert state.commits == 1


def test_a_commit_without_a_step_does_the_same_on_every_rank(group, begun):
    """If any rank accumulates gradients, all ranks skip the commit, and their counts stay equal."""
    counts = []
    for mine, others in ((False, True), (True, False), (False, False)):
        model, optimizer = network()
        state = begun(TorchState(model=model, optimizer=optimizer, seen=0))
        step(model, optimizer)
        optimizer.zero_grad()
        state.commit()
        if mine:
            model(torch.ones(2, 4)).sum().backward()
        state._session.others_accumulate = others
        state.commit()
        counts.append(state.commits)
    assert counts == [1, 1, 2]


def test_the_gpu_is_waited_for_only_where_a_commit_without_a_step_counts(group, begun):
    """An optimizer step has waited for the GPU already. While gradients accumulate no wait is needed."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    step(model, optimizer)
    state.commit()
    backward(model)
    state.commit()
    assert state._session.settled == 0
    optimizer.zero_grad()
    state.commit()
    assert state._session.settled == 1


def test_a_scaler_that_skips_a_step(group, begun):
    """GradScaler skips a step when gradients overflow; the next commit that counts records its scale."""
    model, optimizer = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = begun(TorchState(model=model, optimizer=optimizer, scaler=scaler))
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        state.commit()
    assert (state.commits, scaler.get_scale(), copies(state)) == (2, 2.0, 0)
    scaler.update(new_scale=16.0)
    state.restore()
    assert scaler.get_scale() == 2.0


def test_no_step_is_begun_in_a_broken_world(group, begun):
    """An abort that arrives before a step keeps the rank at its last commit; between two optimizers' steps it waits."""
    one, first = network()
    two, second = network(2)
    state = begun(TorchState(one=one, two=two, first=first, second=second))
    backward(one)
    backward(two)
    broken = []

    def check(where):
        if broken:
            raise WorldAborted

    state._session.check = check
    first.step()
    broken.append(True)
    second.step()
    state.commit()
    assert state.clean
    backward(one)
    with pytest.raises(WorldAborted):
        first.step()
    assert state.clean


def test_a_state_that_ends_leaves_the_hook_of_another():
    """Each state has a hook that runs after backward passes; without any, PyTorch's own function is back."""
    calls, original = [], torch.autograd.backward
    first, second = BackwardHook(lambda: calls.append(1)), BackwardHook(lambda: calls.append(2))
    first.remove()
    torch.ones(1, requires_grad=True).backward()
    assert calls == [2]
    second.remove()
    assert torch.autograd.backward is original
