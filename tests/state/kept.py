"""States for the tests of checkpoints, and functions that train, save and compare them."""

import torch

import nbelastic as nbe
from nbelastic.state import checkpoint_files as checkpoint
from nbelastic.state import checkpoints as saving
from nbelastic.state.transfer import describe


def network(width=4, seed=0):
    """A state with every kind of content that a state can hold."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return nbe.TorchState(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=2),
        sampler=nbe.ElasticSampler(range(10)),
        half=torch.zeros(2, 3, dtype=torch.bfloat16),
        scalar=torch.tensor(0),
        empty=torch.zeros(0, 3),
        turned=torch.zeros(2, 3).t(),
        history=[],
        epoch=0,
    )


def train(state, steps=1):
    for _ in range(steps):
        loss = state.model(torch.randn(5, 3)).pow(2).mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.scheduler.step()
        state.half = state.half + 1
        state.scalar = state.scalar + 1
        state.turned = (state.turned.t() + 1).t()
        state.history = [*state.history, (state.epoch, {"loss": loss.item()})]
        state.epoch += 1
        state.commit()
    return state


def contents(state):
    """A description and a copy of everything in a state."""
    tensors = []
    described = describe(state._live(), tensors)
    return described, [tensor.clone() for tensor in tensors]


def counter(commits=0, **values):
    state = nbe.ObjectState(step=0, weights=torch.zeros(4), **values)
    return count(state, commits)


def count(state, commits=1):
    for _ in range(commits):
        state.step += 1
        state.weights = torch.full((4,), float(state.step))
        state.commit()
    return state


def written(folder):
    return [path.name for path in reversed(checkpoint.listed(folder))]


def write(state, folder, keep=3):
    return saving.save(state, folder, keep=keep).wait()
