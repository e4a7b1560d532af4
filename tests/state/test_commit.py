"""When a commit copies tensors, when it does not, and what it copies: over a real group of one."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from nbelastic import StateError, TorchState
from nbelastic.state.tensor_snapshot import ALIGNMENT, allocate
from nbelastic.worker.interrupts import WorldAborted
from nbelastic.worker.process_group import collectives
from tests.state.training import backward, copies, network, no_memory, step, weights, wrapping


def test_a_collective_between_step_and_commit_is_noticed(group, begun, capsys):
    """A collective between step and commit makes commits copy, as an abort could split them; one line explains why."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    step(model, optimizer)
    state.commit()
    assert copies(state) == 0
    for _ in range(2):
        step(model, optimizer)
        dist.all_reduce(torch.ones(1))
        state.commit()
        assert copies(state) == 4  # two parameters, and their momentum
    before = weights(model)
    step(model, optimizer)
    state.restore()
    assert weights(model) == before
    assert capsys.readouterr().err.count("a collective runs between optimizer.step() and state.commit()") == 1


def test_several_steps_per_commit_print_nothing(group, begun, capsys):
    """With several steps per commit, which the program chose, tensors are copied and nothing is printed."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    for _ in range(3):
        step(model, optimizer)
    state.commit()
    assert copies(state) == 4
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_alone", [False, True])  # in a world of one no collective is needed
def test_an_optimizer_that_steps_more_often_than_another_prints_nothing(group, begun, capsys, is_alone):
    """A GAN trains its discriminator twice per step of the generator: the program chose that, as it commits after both."""
    one, first = network()
    two, second = network(2)
    state = begun(TorchState(one=one, two=two, first=first, second=second))
    for model, optimizer in ((one, first), (one, first), (two, second)):
        model(torch.ones(2, 4)).sum().backward()
        if not is_alone:
            dist.all_reduce(torch.ones(1))
        optimizer.step()
    state.commit()
    assert copies(state) == 8
    assert capsys.readouterr().err == ""


def test_two_optimizers_that_step_together_need_no_copies(group, begun):
    """Two optimizers that step without a collective in between need no copies, because no abort can separate them."""
    one, first = network()
    two, second = network(2)
    state = begun(TorchState(one=one, two=two, first=first, second=second))
    for _ in range(3):
        backward(one)
        backward(two)
        first.step()
        second.step()
        state.commit()
        assert copies(state) == 0


def test_two_optimizers_that_step_alternately_are_copied(group, begun):
    """Two optimizers with a collective between their steps, as in a GAN, are copied."""
    one, first = network()
    two, second = network(2)
    state = begun(TorchState(one=one, two=two, first=first, second=second))
    for _ in range(2):
        step(one, first)
        step(two, second)
        state.commit()
    before = weights(one, two)
    step(one, first)
    state.restore()
    assert weights(one, two) == before


def test_a_tensor_that_changes_outside_an_optimizer_is_named(group, begun, capsys):
    """A tensor that changes between commit and step makes later commits copy, and one line names the tensor."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    step(model, optimizer)
    state.commit()
    with torch.no_grad():
        model.bias.clamp_(-0.01, 0.01)
    assert not state.clean
    step(model, optimizer)
    state.commit()
    before = weights(model)
    with torch.no_grad():
        model.bias.mul_(2)
    state.restore()
    assert weights(model) == before
    assert "nbelastic: model.bias changes outside an optimizer's step" in capsys.readouterr().err


def test_wrapping_the_model_does_not_change_it(group, begun, capsys):
    """DistributedDataParallel's constructor sends nothing of a model in the state, and does not count as a change."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    step(model, optimizer)
    state.commit()
    for _ in range(2):
        before = collectives()
        with wrapping(state):
            ddp = nn.parallel.DistributedDataParallel(model, init_sync=True)
        assert collectives() == before
        assert state.clean
        step(ddp, optimizer)
        state.commit()
        del ddp
    assert (copies(state), capsys.readouterr().err) == (0, "")
    with torch.no_grad():
        model.bias.add_(1)
    with wrapping(state):
        ddp = nn.parallel.DistributedDataParallel(model)
    assert not state.clean
    del ddp


def test_ddp_receives_no_sizes_in_a_world_that_is_over(group, begun):
    """Its second pass receives the sizes of its buckets, and allocates what they say: that begins only in a whole world.

    Once DDP has its buckets, nothing is checked any more.
    """
    model, optimizer = network()
    state, calls = begun(TorchState(model=model, optimizer=optimizer)), []
    over = False

    def check():
        calls.append(collectives())
        if over:
            raise WorldAborted

    with wrapping(state, check):
        ddp = nn.parallel.DistributedDataParallel(model)
        step(ddp, optimizer)
        over, before, calls = True, collectives(), []
        with pytest.raises(WorldAborted):
            step(ddp, optimizer)
        assert calls == [before] == [collectives()]
        over = False
        step(ddp, optimizer)
        calls = []
        step(ddp, optimizer)
        assert calls == []
    del ddp


@pytest.mark.parametrize("is_cut_off", [True, False])
def test_an_error_that_garbage_has_caused(group, begun, monkeypatch, is_cut_off):
    """DDP asks for the memory that an aborted collective names: the world is over, and the job goes on. Else it is DDP's own error."""
    model, optimizer = network()
    state, over = begun(TorchState(model=model, optimizer=optimizer)), False

    def check():
        if over:
            raise WorldAborted

    def forward(*_):
        nonlocal over
        over = is_cut_off
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_pre_forward", forward)
    with wrapping(state, check):
        ddp = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(WorldAborted if is_cut_off else torch.OutOfMemoryError):
            ddp(torch.ones(2, 4))
    del ddp


def test_averaged_weights_updated_after_the_step_need_no_copies(group, begun):
    """An exponential moving average belongs to no optimizer, but no collective runs between its change and the commit."""
    model, optimizer = network()
    average = torch.optim.swa_utils.AveragedModel(model)
    state = begun(TorchState(model=model, average=average, optimizer=optimizer))
    for _ in range(3):
        step(model, optimizer)
        average.update_parameters(model)
        state.commit()
        assert copies(state) == 0
        assert state.clean


def test_an_optimizer_without_hooks_is_copied(group, begun):
    """An optimizer without hooks is copied: autograd's version counters show that its tensors changed."""

    class Plain:
        def __init__(self, parameters):
            self.parameters, self.steps = list(parameters), 0

        def step(self):
            self.steps += 1
            with torch.no_grad():
                for p in self.parameters:
                    p.sub_(p.grad)

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    model, _ = network()
    optimizer = Plain(model.parameters())
    state = begun(TorchState(model=model, optimizer=optimizer))
    for _ in range(2):
        model.zero_grad()
        backward(model)
        optimizer.step()
        state.commit()
    before = weights(model)
    backward(model)
    optimizer.step()
    state.restore()
    assert (weights(model), optimizer.steps) == (before, 2)


def test_copies_take_little_more_memory_than_what_they_copy():
    """Aligned copies take at most ALIGNMENT bytes more per tensor."""
    tensors = [torch.ones(1000), torch.ones(3), torch.ones(5, dtype=torch.uint8)]
    places = allocate([(tensor, tensor.device, False) for tensor in tensors])
    assert [(p.shape, p.dtype) for p in places] == [(t.shape, t.dtype) for t in tensors]
    assert all(place.data_ptr() % ALIGNMENT == places[0].data_ptr() % ALIGNMENT for place in places)
    taken, needed = places[0].untyped_storage().nbytes(), sum(tensor.nbytes for tensor in tensors)
    assert needed <= taken <= needed + len(tensors) * ALIGNMENT


def test_a_replaced_buffer_is_restored(group, begun):
    """After a forward pass has replaced a buffer, a restore puts the committed tensor back."""
    model, optimizer = network()
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("large", torch.zeros(1 << 19))
    state = begun(TorchState(model=model, optimizer=optimizer))
    model.mean = torch.ones(2)
    model.large += 1
    state.commit()
    kept = model.mean
    model.mean = torch.full((2,), 5.0)
    model.large[3] = 9
    state.restore()
    assert model.mean is kept
    assert (model.mean.tolist(), model.large.max().item()) == ([1, 1], 1)


@pytest.mark.filterwarnings("ignore:Guards may run slower")  # torch warns so with Python 3.13.0
def test_a_compiled_model(group, begun):
    """A restore works for a model in `torch.compile`, which has the same parameters."""
    model, _ = network()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.Adam(compiled.parameters())
    state = begun(TorchState(model=compiled, optimizer=optimizer))
    for _ in range(2):
        for _ in range(2):
            step(compiled, optimizer)
        state.commit()
    before = weights(model)
    step(compiled, optimizer)
    state.restore()
    assert weights(model) == before


def test_a_restore_that_is_refused_changes_nothing(group, begun):
    """Nothing was copied, and the step was made: counters of the commit would not fit the weights."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer, epoch=0))
    step(model, optimizer)
    state.commit()
    step(model, optimizer)
    state.epoch, before = 1, weights(model)
    with pytest.raises(StateError, match=r"restore before optimizer\.step\(\)"):
        state.restore()
    assert (state.epoch, weights(model)) == (1, before)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_outside_a_job_every_commit_is_copied():
    """Outside a job every commit copies, because the user may call `restore()` at any time."""
    model, optimizer = network()
    state = TorchState(model=model, optimizer=optimizer, step=0)
    start = weights(model)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    state.restore()
    assert weights(model) == start
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state.step = 1
    state.commit()
    before, momentum = weights(model), copy.deepcopy(optimizer.state_dict())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state.restore()
    assert (weights(model), state.step) == (before, 1)
    assert str(optimizer.state_dict()) == str(momentum)


@pytest.mark.parametrize("value", [object(), {1: np.zeros(3)}, [lambda: 0]])
def test_data_that_is_not_plain_is_refused_at_once(begun, value):
    """Data that is not plain is refused when the elastic loop begins, not when a newcomer joins. The error names the value."""
    with pytest.raises(StateError, match="the state's 'thing' is or holds something that is not plain data"):
        begun(TorchState(step=0, thing=value))


def test_options_that_are_not_plain_are_refused_at_once(begun):
    """Some optimizers keep a class or a function in their groups."""
    model, optimizer = network()
    optimizer.param_groups[0]["kind"] = type(optimizer)
    with pytest.raises(StateError, match="the state's 'optimizer' is or holds something that is not plain data"):
        begun(TorchState(model=model, optimizer=optimizer))


@pytest.mark.parametrize("steps", [1, 2])  # per commit: with two of them it copies tensors
def test_a_commit_that_cannot_record_a_value_is_none(group, begun, steps):
    """The state is not the weights of one commit with the counters of another: it is of no commit until the next one."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer, loss=0.0))
    for _ in range(steps):
        step(model, optimizer)
    state.commit()
    for _ in range(steps):
        step(model, optimizer)
    state.loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(StateError, match="loss holds a tensor that autograd still needs"):
        state.commit()
    state.undo()
    assert (state.commits, state.clean, state.loss) == (1, False, 0.0)
    state.commit()
    assert (state.commits, state.clean) == (2, True)


def test_a_commit_without_memory_for_its_copies_is_none(group, begun, monkeypatch):
    """Nothing is restored of the copies until the next commit has made all of them."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))

    def two_steps():
        step(model, optimizer)
        step(model, optimizer)

    two_steps()
    state.commit()
    two_steps()
    state._tensors._copies.pop(id(model.weight))  # as on a GPU, whose first copy of a tensor is not used again
    with monkeypatch.context() as patch:
        patch.setattr("nbelastic.state.tensor_snapshot.allocate", no_memory)
        with pytest.raises(RuntimeError, match="no memory"):
            state.commit()
    state.undo()
    assert (state.commits, state.clean) == (1, False)
    state.commit()
    before = weights(model)
    step(model, optimizer)
    state.restore()
    assert (state.commits, weights(model)) == (2, before)
