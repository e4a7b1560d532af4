"""A small model whose training the tests of commits observe."""

import torch
import torch.distributed as dist
from torch import nn

from nbelastic.state.ddp_patch import unchanged_by_ddp
from nbelastic.state.transfer import describe


def network(seed=1):
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(model):
    """Compute gradients and run one collective, as DDP does."""
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(1))


def step(model, optimizer):
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def weights(*models):
    return [p.tolist() for model in models for p in model.parameters()]


def wrapping(state, check=lambda: None, on_any_rank=lambda mine, _: mine):
    """What the elastic loop does around the function: DDP's constructor sends only what may differ."""
    return unchanged_by_ddp(state._contents, state._tensors, check, on_any_rank)


def copies(state):
    return len(state._tensors._copies)


def no_memory(wanted):
    """In the place of `tensor_snapshot.allocate`."""
    if wanted:
        raise RuntimeError("no memory")
    return []


def receive(state, sender):
    """Give `state` what `sender` holds, as a transfer over a group does."""
    outgoing = []
    described = describe(sender._live(), outgoing)

    def fill(places):
        with torch.no_grad():
            for place, tensor in zip(places, outgoing, strict=True):
                place.copy_(tensor)

    state._accept(described, torch.device("cpu"), fill)


def unfreezing(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.Adam(model[1].parameters(), lr=0.1)
    return model, optimizer
