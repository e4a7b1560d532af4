"""Lists, dicts and other small values: whose objects they are after a break, on a newcomer, and of which class."""

import copy
from collections import Counter, OrderedDict, defaultdict
from itertools import permutations

import pytest
import torch
from torch import nn

from nbelastic import ObjectState, ShardedState, TorchState
from tests.state.training import receive


def test_the_program_s_own_names_stay_good_after_a_break(begun):
    """The program appends to its own list, and not to `state.history`: the next commit still has it."""
    history, best = [], {"loss": 9}
    state = begun(ObjectState(history=history, best=best))
    history.append(1)
    best["loss"] = 5
    state.commit()
    history.append(2)
    best["at"] = 2
    state.undo()
    assert (history, best) == ([1], {"loss": 5})
    history.append(3)
    state.commit()
    state.undo()
    assert state.history is history
    assert state.best is best
    assert history == [1, 3]


@pytest.mark.parametrize("kind", [ObjectState, ShardedState])
def test_a_newcomer_s_names_stay_good_and_its_classes_too(kind):
    """What arrives is plain data; it goes into the objects that the newcomer's program has made."""

    def made():
        return kind(seen=[], counts=Counter(), words=defaultdict(list), order=OrderedDict())

    sender, newcomer = made(), made()
    sender.seen.append(3)
    sender.counts.update("abba")
    sender.words["x"].append(1)
    sender.order["y"] = 0
    own = dict(newcomer._contents.values)
    if kind is ObjectState:
        receive(newcomer, sender)
    else:
        newcomer._set_small(
            {"small": {"seen": [3], "counts": {"a": 2, "b": 2}, "words": {"x": [1]}, "order": {"y": 0}}}
        )
    assert all(newcomer._contents.values[name] is value for name, value in own.items())
    assert newcomer._contents.values == sender._contents.values
    newcomer.counts["new"] += 1
    newcomer.words["new"].append(1)
    newcomer.order.move_to_end("y")


@pytest.mark.parametrize(("committed", "later"), [*permutations([None, {"loss": 9}, [9]], 2)])
def test_a_value_that_becomes_a_list_or_dict_or_is_none_any_more(begun, committed, later):
    """After a break it is what the commit had, of whatever kind."""
    state = begun(ObjectState(best=copy.copy(committed)))
    state.best = copy.copy(later)
    state.undo()
    assert state.best == committed


def test_a_replaced_value_is_left_alone(begun):
    """A program that takes a value from a table of its own finds that table as it was."""
    phases = [{"rate": rate} for rate in range(3)]
    state = begun(ObjectState(phase=phases[0], counts=Counter()))
    state.phase, state.counts = phases[1], Counter("a")
    state.commit()
    state.phase, state.counts = phases[2], Counter("b")
    state.undo()
    assert state.phase == {"rate": 1}
    assert phases == [{"rate": rate} for rate in range(3)]
    assert state.counts == Counter("a")
    other = ObjectState(phase={}, counts=Counter())
    other.counts = Counter("c")
    receive(other, state)
    assert type(other.counts) is Counter


def test_a_newcomer_s_values_may_be_one_tensor_or_one_of_its_model():
    """The sender has kept its best weights since, and its sums differ: the newcomer gets all three as they are there."""

    def made():
        model, nothing = nn.Linear(2, 1, bias=False), torch.zeros(2)
        first = model.weight.detach()
        return TorchState(model=model, best=model.state_dict(), one=first, sums=nothing, squares=nothing)

    sender, newcomer = made(), made()
    sender.best, sender.one, sender.squares = (
        {"weight": torch.full((1, 2), 5.0)},
        torch.full((1, 2), 6.0),
        torch.ones(2),
    )
    with torch.no_grad():
        sender.model.weight.fill_(7)
    receive(newcomer, sender)
    found = [newcomer.model.weight, newcomer.best["weight"], newcomer.one, newcomer.sums, newcomer.squares]
    assert [one.flatten().tolist() for one in found] == [[7, 7], [5, 5], [6, 6], [0, 0], [1, 1]]


def test_a_break_writes_nothing_through_a_value_into_the_model(begun):
    """After the commit the program has assigned the weights themselves, without a copy, and a worker is lost."""
    model = nn.Linear(2, 1, bias=False)
    state = begun(TorchState(model=model, best=torch.zeros(1, 2)))
    state.commit()
    trained = model.weight.tolist()
    state.best = model.weight.detach()
    state.undo()
    assert (model.weight.tolist(), state.best.tolist()) == (trained, [[0, 0]])


@pytest.mark.parametrize("made", [torch.inference_mode, torch.no_grad])
def test_a_break_replaces_what_nothing_can_be_written_into(begun, made):
    """The result of an evaluation in inference mode, or of `expand()`: writing the commit's values into it would raise."""
    state = begun(ObjectState(scores=None))
    with made():
        state.scores = torch.full((1,), 2.0).expand(3) if made is torch.no_grad else torch.full((3,), 2.0)
    state.commit()
    state.undo()
    assert state.scores.tolist() == [2, 2, 2]


def test_a_break_returns_to_the_objects_of_the_commit(begun):
    """A new scheduler would get the values of the old one, and None would become a dict of them."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    warm_up = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = begun(TorchState(model=model, optimizer=optimizer, first=warm_up, second=warm_up, third=None))
    state.commit()
    state.first = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state.second, state.third = None, state.first
    state.undo()
    assert (state.first, state.second, state.third) == (warm_up, warm_up, None)
    assert warm_up.last_epoch == 0


def test_a_tensor_stays_the_same_object_after_a_break(begun):
    """The program, or an optimizer of its own, may hold it."""
    mean = torch.zeros(2)
    state = begun(ObjectState(mean=mean))
    mean += 1
    state.undo()
    assert state.mean is mean
    assert mean.tolist() == [0, 0]
