"""Changes of large tensors that autograd does not count: a commit copies them as any others."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from nbelastic import TorchState
from nbelastic.state.transfer import Channel
from nbelastic.worker.threads import run_in_thread
from tests.state.conftest import formation

CPU = torch.device("cpu")
LARGE = (600, 500)  # more than a MiB of float32


@pytest.fixture
def channels():
    """`channels(size)`: one channel per rank, from rank 0 to rank 1, over gloo; each rank is a thread here."""
    groups = []

    def connect(size):
        store = dist.HashStore()

        def group(rank):
            made = dist.ProcessGroup(store, rank, size)
            made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=30))
            made._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
            return made

        with ThreadPoolExecutor(size) as threads:
            groups.extend(threads.map(group, range(size)))
        return [channel(rank, one, size) for rank, one in enumerate(groups)]

    def channel(rank, group, size):
        distributed_c10d._world.pg_group_ranks[group] = {one: one for one in range(size)}
        distributed_c10d._world.default_pg = group
        made = Channel(0, (1,), rank, size, CPU)
        distributed_c10d._world.default_pg = None
        return made

    yield connect
    for group in groups:
        del distributed_c10d._world.pg_group_ranks[group]


class Network(nn.Module):
    """A large constant buffer, a frozen layer and a trained one."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("basis", torch.rand(LARGE))
        self.frozen = nn.Linear(*LARGE).requires_grad_(False)
        self.head = nn.Linear(LARGE[0], LARGE[1])


def contents(state):
    return [tensor.clone() for tensor in (*state.model.parameters(), *state.model.buffers())]


@pytest.mark.parametrize("size", [2, 3], ids=["broadcast", "from one rank to one"])
def test_a_newcomer_that_returns_to_its_first_commit_has_what_it_received(channels, begun, size):
    """It joins a job that copies: its copies are of the state that it received, and not of what its constructors made."""
    sender, newcomer = (TorchState(model=Network(seed), step=0) for seed in range(2))
    begun(sender)
    begun(newcomer)
    sender._steps.copying = "several steps per commit"
    sending, receiving = channels(size)[:2]
    sent = run_in_thread(lambda: sender._transfer(sending, formation(0, size, receivers=(1,))))
    newcomer._transfer(receiving, formation(1, size, receivers=(1,)))
    sent.result(10)
    newcomer.undo()
    assert all(map(torch.equal, contents(newcomer), contents(sender)))
