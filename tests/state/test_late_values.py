"""Values that the program assigns or fills during a job: models, other schedulers, arrays; and optimizers unlike torch's."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from nbelastic import StateError, TorchState
from tests.state.training import copies, network, receive, step, weights


def test_a_model_that_is_assigned_late_is_part_of_the_next_commit(group, begun):
    """As an average that begins after a warm-up: a break returns to its values at the commit, as to all others."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer, average=None))
    for _ in range(2):  # so commits copy
        step(model, optimizer)
    state.average = torch.optim.swa_utils.AveragedModel(model)
    state.average.update_parameters(model)
    state.commit()
    committed = [p.tolist() for p in state.average.parameters()]
    step(model, optimizer)
    state.average.update_parameters(model)
    state.restore()
    assert [p.tolist() for p in state.average.parameters()] == committed


def test_the_steps_of_an_optimizer_that_is_assigned_late_are_noticed(group, begun):
    """Nothing else counts the changes of a fused one: a rank that had stepped was taken for one that is at its commit."""
    model, optimizer = network()
    head = nn.Linear(4, 3)
    state = begun(TorchState(model=model, optimizer=optimizer, head=head, late=None))
    state.late = torch.optim.Adam(head.parameters(), fused=True)
    state.late = state.late  # as when the function is called again
    step(head, state.late)
    state.commit()
    assert state.clean
    assert not copies(state)
    step(head, state.late)
    assert not state.clean
    with pytest.raises(StateError, match="the tensors have changed since the last commit"):
        state.restore()


def test_a_newcomer_without_the_late_model_says_what_it_has_instead(begun):
    """It has None, which is a value too: the name is in both states."""
    sender, newcomer = (begun(TorchState(model=network()[0], average=None)) for _ in range(2))
    sender.average = nn.Linear(4, 3)
    sender.commit()
    with pytest.raises(StateError, match="'average' is a small value here and a model in the received state"):
        receive(newcomer, sender)


WARM_UP, COSINE = lr_scheduler.LinearLR, lr_scheduler.CosineAnnealingLR


def with_scheduler(begun, kind):
    model, optimizer = network()
    scheduler = None if kind is None else kind(optimizer) if kind is WARM_UP else kind(optimizer, 20)
    return begun(TorchState(model=model, optimizer=optimizer, scheduler=scheduler))


@pytest.mark.parametrize(("theirs", "named"), [(COSINE, "CosineAnnealingLR"), (None, "none")])
def test_a_scheduler_of_another_class_is_refused(begun, theirs, named, tmp_path):
    """The values of one class would give another learning rate in another, so the ranks' models would differ."""
    problem = f"the class of scheduler is LinearLR here and {named} in the received state"
    sender = with_scheduler(begun, theirs)
    sender.commit()
    sender.save(tmp_path).wait()
    for take in (lambda state: receive(state, sender), lambda state: state.load(tmp_path)):
        with pytest.raises(StateError, match=problem):
            take(with_scheduler(begun, WARM_UP))


def test_a_scheduler_that_the_function_makes_at_its_top_may_be_none_before(begun):
    """Each rank makes it anew there, whatever it has received."""
    sender, newcomer = with_scheduler(begun, COSINE), with_scheduler(begun, None)
    sender.commit()
    receive(newcomer, sender)
    newcomer.scheduler = COSINE(newcomer.optimizer, 20)
    newcomer.commit()


@pytest.mark.parametrize("kind", [WARM_UP, COSINE, None])
def test_a_scheduler_of_the_same_class_is_received(begun, kind):
    """So is None, if no rank has one yet."""
    sender, newcomer = with_scheduler(begun, kind), with_scheduler(begun, kind)
    if kind is not None:
        sender.optimizer.step()
        sender.scheduler.step()
    sender.commit()
    receive(newcomer, sender)
    assert kind is None or newcomer.scheduler.last_epoch == 1


class Sharp(torch.optim.Optimizer):
    """As SAM: it steps by another optimizer."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self._base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self._base.param_groups

    def step(self):
        self._base.step()


class Wrapped(torch.optim.Optimizer):
    """As Accelerate's: all that it has is the other optimizer's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)


def test_an_optimizer_inside_another_must_be_in_the_state(begun):
    """Newcomers would not get its momentum, and their models would differ from then on."""
    model, _ = network()
    sharp = Sharp(model.parameters())
    with pytest.raises(StateError, match=r"sharp\._base is an optimizer of its own.*sharp=sharp, base=sharp\._base"):
        TorchState(model=model, sharp=sharp)
    sender = begun(TorchState(model=model, sharp=sharp, base=sharp._base))
    model(torch.ones(2, 4)).sum().backward()
    sharp.step()
    sender.commit()
    model, _ = network()
    own = Sharp(model.parameters())
    newcomer = begun(TorchState(model=model, sharp=own, base=own._base))
    receive(newcomer, sender)
    momentum = own._base.state[model.weight]["momentum_buffer"]
    assert torch.equal(momentum, sharp._base.state[sender.model.weight]["momentum_buffer"])
    assert TorchState(model=model, optimizer=Wrapped(own._base)).optimizer.state is own._base.state


@pytest.mark.parametrize(("several", "name"), [(list, "parts[0]"), (lambda one: {"base": one[0]}, "parts['base']")])
def test_an_optimizer_in_a_list_of_another_must_be_in_the_state(several, name):
    """So do optimizers that step by one for the matrices and another one for the rest."""
    model, whole = network()
    whole.parts = several([torch.optim.SGD(model.parameters(), momentum=0.9)])
    with pytest.raises(StateError, match=re.escape(f"whole.{name} is an optimizer of its own")) as error:
        TorchState(model=model, whole=whole)
    assert re.search(rf"TorchState\(whole=whole, parts_(0|base)=whole\.{re.escape(name)}, …\)", str(error.value))
    TorchState(model=model, whole=whole, part=next(iter(whole.parts)) if several is list else whole.parts["base"])


def test_what_an_optimizer_keeps_by_parameter_is_not_written_as_text():
    """The text of a tensor takes 7 ms, at each survey: with the names of 300 parameters it took 2 s instead of 3 ms."""

    class Named(nn.Parameter):
        def __repr__(self):
            raise AssertionError

    model = nn.Module()
    model.weight = Named(torch.ones(1))
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.names = {model.weight: "weight"}
    TorchState(model=model, optimizer=optimizer)


class Slow(torch.optim.Optimizer):
    """As Lookahead: torch's constructor is not called, and each second step goes only half of the way."""

    def __init__(self, base):
        self.base, self.state, self.defaults = base, {}, base.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.param_groups = base.param_groups
        self.param_groups[0]["count"] = 0

    @torch.no_grad()
    def step(self):
        self.base.step()
        group = self.param_groups[0]
        group["count"] += 1
        for p in group["params"] if group["count"] % 2 == 0 else ():
            slow = self.base.state[p].setdefault("slow", p.clone())
            p.copy_(slow.lerp_(p, 0.5))


def test_an_optimizer_without_hooks_of_its_own(group, begun):
    """The steps of the one inside are seen, so nothing is copied, and a newcomer goes on alike."""
    states = []
    for _ in range(2):
        model, base = network()
        states.append(begun(TorchState(model=model, optimizer=Slow(base), base=base)))
    sender, newcomer = states
    for _ in range(3):
        step(sender.model, sender.optimizer)
        sender.commit()
    assert not sender._steps.copying
    receive(newcomer, sender)
    for state in states:
        step(state.model, state.optimizer)
        assert state.optimizer.param_groups[0]["count"] == 4
    assert weights(sender.model) == weights(newcomer.model)


class Swapping(Slow):
    """As pytorch-optimizer's ScheduleFreeWrapper, which has the other one by this name."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.optimizer = optimizer

    def eval(self):
        """Change the weights."""


class Accelerated(Swapping):
    """Accelerate's wrapper has eval() in any case."""

    __module__ = "accelerate.optimizer"


@pytest.mark.parametrize(("wrapper", "copies"), [(Swapping, True), (Accelerated, False)])
def test_a_wrapper_that_swaps_weights_is_known_by_its_own_methods(begun, wrapper, copies):
    """It was known by those of the optimizer in it, which has none: copies began late, with a line that does not apply."""
    model, base = network()
    state = begun(TorchState(model=model, optimizer=wrapper(base), base=base))
    assert bool(state._steps.copying) is copies


class Averaging(torch.optim.SGD):
    """As a schedule-free one: `eval()` replaces the weights by averages, and an option says whether it has."""

    @torch.no_grad()
    def eval(self):
        self.param_groups[0]["averaged"] = True
        for p in self.param_groups[0]["params"]:
            p.mul_(0.5)


def test_the_first_evaluation_with_averaged_weights_is_undone(group, begun):
    """The option returned to its value at the commit, and the weights stayed averaged: the training went on with them."""
    model, _ = network()
    state = begun(
        TorchState(model=model, optimizer=Averaging([{"params": model.parameters(), "averaged": False}], lr=0.1))
    )
    step(model, state.optimizer)
    state.commit()
    committed = weights(model)
    state.optimizer.eval()
    state.generation_ended(aborted=True)
    assert state.clean
    assert weights(model) == committed
    assert state.optimizer.param_groups[0]["averaged"] is False


@pytest.mark.parametrize("length", [1, 5])
def test_transitions_of_arrays_are_saved_and_sent_if_arrays_are_allowed(begun, tmp_path, length):
    """A replay buffer has (observation, action, reward, next observation, end): an array cannot be compared with a text."""
    arrays = [np.ones(1).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype("float64"))]
    with torch.serialization.safe_globals(arrays):
        state = begun(TorchState(replay=[]))
        state.replay.append((np.ones(3), 1, 0.5, np.zeros(3), False)[:length])
        state.commit()
        state.save(tmp_path).wait()
        loaded, newcomer = TorchState(replay=[]), begun(TorchState(replay=[]))
        loaded.load(tmp_path)
        receive(newcomer, state)
        for other in (loaded, newcomer):
            assert other.replay[0][0].tolist() == [1, 1, 1]
            assert other.replay[0][1:3] == state.replay[0][1:3]
