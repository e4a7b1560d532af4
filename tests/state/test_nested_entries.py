"""Optimizers that keep tensors inside of dicts, lists and tuples: copied, restored, received, hashed and checked as others."""

import pytest
import torch

from nbelastic import StateError, TorchState
from tests.state.conftest import FakeSession, formation
from tests.state.training import backward, receive


class Nested(torch.optim.Optimizer):
    """It counts its steps in tensors at four depths."""

    def __init__(self, parameters, make=torch.zeros_like):
        super().__init__(parameters, {})
        self._make = make

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            entry = self.state[p]
            if not entry:
                entry["pre"] = {"m": self._make(p), "rows": [self._make(p), (self._make(p), 3)]}
            for tensor in counters(entry):
                tensor.add_(1)
            p.add_(1)


def counters(entry):
    first, (second, _) = entry["pre"]["rows"]
    return entry["pre"]["m"], first, second


def counts(state):
    optimizer = state.optimizer
    return {t.max().item() for p in optimizer.param_groups[0]["params"] for t in counters(optimizer.state[p])}


def made(**options):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 3)
    return TorchState(model=model, optimizer=Nested(model.parameters(), **options))


def test_a_break_returns_to_the_commit_at_any_depth(group, begun):
    """With several steps per commit. The tensors stay the optimizer's own."""
    state = begun(made())
    for _ in range(2):
        for _ in range(2):
            state.optimizer.step()
            backward(state.model)
        state.commit()
    kept = counters(state.optimizer.state[state.model.weight])
    state.optimizer.step()
    state.restore()
    assert counts(state) == {4.0}
    assert all(map(lambda one, other: one is other, kept, counters(state.optimizer.state[state.model.weight])))


def test_they_are_received(group, begun):
    """A newcomer goes on from the sender's, and returns to them."""
    sender, newcomer = begun(made()), begun(made())
    for _ in range(3):
        sender.optimizer.step()
    sender.commit()
    receive(newcomer, sender)
    assert counts(newcomer) == {3.0}
    newcomer.optimizer.step()
    newcomer.restore()
    assert counts(newcomer) == {3.0}


def test_they_are_hashed(group):
    """A flipped bit of one shows in the next hash."""

    def hashed(change):
        state, session = made(), FakeSession()
        state.begin(session)
        state.sync(formation(0, 1))
        session.hashes = state._replica.begin(formation(0, 3))
        for _ in range(2):
            state.optimizer.step()
            for index in change:
                counters(state.optimizer.state[state.model.bias])[index].data[0] += 1
            state.commit()
        state.end()
        return session.hashes().by_commit

    assert hashed([]) == hashed([])
    assert all(hashed([index]) != hashed([]) for index in range(3))


def test_a_class_that_cannot_be_sent_is_refused(group, begun):
    """Also inside of a dict."""
    kind = type("Small", (torch.Tensor,), {})
    state = begun(made(make=lambda p: torch.zeros_like(p).as_subclass(kind)))
    state.optimizer.step()
    with pytest.raises(StateError, match="optimizer keeps Small instead of plain tensors"):
        state.commit()
