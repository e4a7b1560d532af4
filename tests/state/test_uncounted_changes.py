"""Changes of large tensors that autograd does not count: a commit copies them as any others."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from nbelastic import TorchState
from nbelastic.state import tensor_snapshot
from nbelastic.state.transfer import Channel
from nbelastic.worker.threads import run_in_thread
from tests.state.conftest import formation
from tests.state.training import step

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


def fused():
    """A model with a frozen layer, and a fused optimizer of all its layers."""
    model = nn.Sequential(nn.Linear(4, LARGE[0]), nn.Linear(*LARGE), nn.Linear(LARGE[1], LARGE[0]))
    model[2].requires_grad_(False)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def numbers(model, optimizer):
    kept = [t for p in model.parameters() for t in optimizer.state[p].values()]
    return [t.detach().clone() for t in (*model.parameters(), *kept)]


def test_a_fused_optimizer_s_tensors_are_copied_and_a_frozen_layer_s_are_not(group, begun, monkeypatch):
    """With several steps per commit a break returns to the weights of the last commit, and not to the first ones."""
    model, optimizer = fused()
    state = begun(TorchState(model=model, optimizer=optimizer))
    copied = []
    copy_all = tensor_snapshot.copy_all
    monkeypatch.setattr(
        tensor_snapshot, "copy_all", lambda sources, to: [copied.extend(sources), copy_all(sources, to=to)]
    )
    for _ in range(3):
        step(model, optimizer)
        step(model, optimizer)
        copied.clear()
        state.commit()
    assert len([t for t in copied if t.nbytes > tensor_snapshot.SMALL]) == 3  # a weight, and two averages of it
    copied.clear()
    state.commit()  # no step was made
    assert all(t.nbytes <= tensor_snapshot.SMALL for t in copied)
    before = numbers(model, optimizer)
    step(model, optimizer)
    state.restore()
    assert all(map(torch.equal, numbers(model, optimizer), before))


def test_a_large_target_network_is_not_reset_to_its_first_values(group, begun):
    """Reinforcement learning moves it through `.data`, which is not counted: it was copied once, many commits ago."""
    model, optimizer = fused()
    state = begun(TorchState(model=model, optimizer=optimizer))
    for _ in range(3):
        step(model, optimizer)
        step(model, optimizer)
        model[2].weight.data.add_(1)
        state.commit()
    moved = model[2].weight.tolist()
    step(model, optimizer)
    state.restore()
    assert model[2].weight.tolist() == moved
    with torch.no_grad():
        model[2].weight.add_(1)  # this is counted
    state.commit()
    counted = model[2].weight.tolist()
    with torch.no_grad():
        model[2].weight.zero_()
    state.restore()
    assert model[2].weight.tolist() == counted


def test_a_target_network_that_has_moved_since_is_received_once_and_copied_from_then_on(group, begun):
    """Of two survivors at the same commit, one has moved it already. It is not known which: both differ until they receive it."""
    model, optimizer = fused()
    state = begun(TorchState(model=model, optimizer=optimizer))
    for _ in range(3):
        step(model, optimizer)
        step(model, optimizer)
        state.commit()
    state.restore()
    assert not state._tensors.has_moved
    model[2].weight.data.add_(1)
    state.restore()
    assert state._tensors.has_moved
    state.commit()
    assert not state._tensors.has_moved
    for _ in range(2):
        step(model, optimizer)
        model[2].weight.data.add_(1)
        state.commit()
        committed = model[2].weight.tolist()
        model[2].weight.data.add_(1)
        state.restore()
        assert model[2].weight.tolist() == committed
        assert not state._tensors.has_moved


TYPES = "complex64 bfloat16 float8_e4m3fn float8_e8m0fnu float4_e2m1fn_x2 int64 uint16 bool"


@pytest.mark.parametrize("dtype", [name for name in TYPES.split() if hasattr(torch, name)])  # older versions lack some
def test_a_large_tensor_of_any_type_is_compared(dtype):
    """Torch can neither fill nor compare tensors of some types, so the test writes bytes."""
    snapshot = tensor_snapshot.TensorSnapshot(keep=True)
    tensor = torch.zeros(1 << 21, dtype=torch.uint8).view(getattr(torch, dtype))
    snapshot.commit([tensor])
    (one,) = snapshot._copies.values()
    assert not tensor_snapshot._differs(one)
    tensor.view(torch.uint8).fill_(1)
    assert tensor_snapshot._differs(one)


def test_a_large_tensor_that_is_not_contiguous_is_compared_as_a_whole():
    """One element differs, which is none of the samples."""
    snapshot = tensor_snapshot.TensorSnapshot(keep=True)
    tensor = torch.zeros(1200, 1000).t()
    snapshot.commit([tensor])
    (one,) = snapshot._copies.values()
    assert not tensor_snapshot._differs(one)
    tensor[1, 1] = 1
    assert tensor_snapshot._differs(one)


def test_outside_a_job_no_count_is_trusted():
    """No hook reports the steps there, so each commit copies all tensors."""
    model, optimizer = fused()
    state = TorchState(model=model, optimizer=optimizer)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.commit()
    before = numbers(model, optimizer)
    model[2].weight.data.zero_()
    optimizer.step()
    state.restore()
    assert all(map(torch.equal, numbers(model, optimizer), before))


class Codes(nn.Module):
    """Large buffers: a constant, running statistics and a table that is changed through `.data`."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(LARGE[0] * LARGE[1])
        self.register_buffer("table", torch.zeros(LARGE))


def test_large_buffers_are_those_of_the_last_commit(group, begun):
    """BatchNorm's kernels, `.data` and collectives change buffers without a count, in every loop."""
    codes, (model, optimizer) = Codes(), fused()
    state = begun(TorchState(codes=codes, model=model, optimizer=optimizer))

    def forward():
        codes.norm(torch.rand(2, LARGE[0] * LARGE[1]) + 1)
        codes.table.data.add_(1)

    for _ in range(2):
        forward()
        step(model, optimizer)
        state.commit()
    before = [buffer.clone() for buffer in codes.buffers()]
    forward()
    state.restore()
    assert all(map(torch.equal, codes.buffers(), before))
    assert codes.table.max() == 2


def test_the_beginning_and_an_accepted_cell_are_recorded_whatever_was_counted(group, begun):
    """A program may set its first weights through `.data` after it has made the state, and so may a cell at a commit."""
    model, optimizer = fused()
    state = TorchState(model=model, optimizer=optimizer)
    model[2].weight.data.fill_(1)
    begun(state)
    model[2].weight.data.fill_(2)
    state.restore()
    assert model[2].weight.eq(1).all()
    model[2].weight.data.fill_(3)
    state._cell_ended(accepted=True, changed=False)
    model[2].weight.data.fill_(4)
    state.restore()
    assert model[2].weight.eq(3).all()


def test_a_commit_in_inference_mode(group, begun):
    """A loop evaluates and commits there: the commits after it still write into its copies."""
    model, optimizer = fused()
    state = begun(TorchState(model=model, optimizer=optimizer))
    for mode in (True, False):
        step(model, optimizer)
        step(model, optimizer)
        with torch.inference_mode(mode):
            state.commit()
    before = [weight.detach().clone() for weight in model.parameters()]
    step(model, optimizer)
    state.undo()
    assert all(map(torch.equal, model.parameters(), before))


def test_a_cell_s_change_through_data_is_in_an_exact_mark(begun):
    """Cells at a commit are compared so, whatever types the tensors have. A mark that only counts has no such change."""
    table = nn.Module()
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8):
        table.register_buffer(f"of_{dtype.itemsize}_bytes", torch.zeros(3, dtype=dtype))
    table.register_buffer("empty", torch.zeros(0))
    state = begun(TorchState(table=table))
    counted, exact = (state._mark(exact=exact) for exact in (False, True))
    for buffer in table.buffers():
        assert state._mark(exact=True) == exact
        buffer.data[:1] += 1
        assert (state._mark(exact=True) == exact) is (buffer.numel() == 0)
        assert state._mark(exact=False) == counted
        exact = state._mark(exact=True)


def test_small_values_before_a_cell_can_be_set_again(begun):
    """Counters, and the options of optimizers; of those that the cell has not changed none is set."""
    model, optimizer = fused()
    state = begun(TorchState(model=model, optimizer=optimizer, epoch=1, best=None))
    before = state._small_values()
    optimizer.param_groups[0]["lr"], state.epoch, state.best = 5.0, 2, 0.5
    state._set_small_values({name: before[name] for name in ("epoch", "optimizer")})
    assert (optimizer.param_groups[0]["lr"], state.epoch, state.best) == (0.1, 1, 0.5)
