"""The models that the function makes in the next world go on from a commit with all that the program has changed meanwhile."""

from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import nbelastic as nbe
from nbelastic.worker import ranks
from tests.sharded.fake_world import fake_world
from tests.sharded.test_commits import Session
from tests.state.conftest import formation


@contextmanager
def worlds(monkeypatch, checkpoint=None):
    """`enter()` begins the next world, and returns the state with new models: it trains the last layer only."""
    monkeypatch.setattr(ranks, "device", lambda: torch.device("cpu"))
    state, generations = nbe.ShardedState(), iter(range(1, 9))
    if checkpoint is not None:
        state.load(checkpoint)
    state.begin(Session())
    with fake_world(0, 1) as mesh:

        def enter():
            generation = next(generations)
            if generation > 1:
                state.generation_ended(aborted=True)
            state.sync(formation(0, 1, generation=generation))
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
            model[0].requires_grad_(False)
            fully_shard(model, mesh=mesh)
            state.bind(model=model, optimizer=torch.optim.AdamW(model[2].parameters(), lr=0.1))
            return state

        yield enter
    state.end()


def step(state):
    state.model(torch.ones(2, 4)).sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.commit()


def test_layers_that_were_unfrozen_are_trained_on(monkeypatch):
    """A loop writes `if state.step == 50: layer.requires_grad_(True)`, which the next world does not run again."""
    with worlds(monkeypatch) as enter:
        state = enter()
        state.model[0].requires_grad_(True)
        state.model[1].bias.requires_grad_(False)
        step(state)
        assert [one.requires_grad for one in enter().model.parameters()] == [True, True, True, False, True, True]


def test_groups_that_were_added_are_there_again(monkeypatch):
    """With their options, and with what the optimizer keeps for their parameters. It ended the job."""
    with worlds(monkeypatch) as enter:
        state = enter()
        state.optimizer.add_param_group({"params": list(state.model[1].parameters()), "lr": 0.02})
        step(state)
        first, state = state.optimizer, enter()
        assert [group["lr"] for group in state.optimizer.param_groups] == [0.1, 0.02]
        assert state.optimizer.param_groups[1]["params"] == list(state.model[1].parameters())
        assert len(state.optimizer.state) == len(first.state) == 4
        step(state)
        assert len(enter().optimizer.param_groups) == 2


def test_a_checkpoint_says_which_parameters_are_trained(monkeypatch, tmp_path, capsys):
    """So a job that goes on from one trains what was trained. A line says what the program has set otherwise."""
    with worlds(monkeypatch) as enter:
        state = enter()
        state.model[0].requires_grad_(True)
        step(state)
        path = state.save(tmp_path).wait(20)
    with worlds(monkeypatch, path) as enter:
        assert enter().model[0].weight.requires_grad
    line = f"requires_grad of model.0.weight and of 1 more is as in {path.name}, and not as the program has set it."
    assert line in capsys.readouterr().err
