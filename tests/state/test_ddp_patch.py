"""What DDP's constructor sends of a model in the state, and what a world that breaks meanwhile leaves: with one rank and two."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import utils as distributed_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from nbelastic import TorchState
from nbelastic.state import ddp_patch
from nbelastic.worker.interrupts import WorldAborted
from nbelastic.worker.process_group import collectives
from tests.state.training import copies, network, step, weights, wrapping


def rank_0_loads(rank, model):
    if rank == 0:
        model.load_state_dict({name: torch.full_like(tensor, 7) for name, tensor in model.state_dict().items()})


def rank_0_replaces(rank, model):
    if rank == 0:
        model.weight = nn.Parameter(torch.full_like(model.weight, 7))


def wrap(rank, path):
    """One of two ranks: for each kind of change its weights after DDP was made."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)

    def on_any_rank(mine, group):
        found = torch.tensor([mine], dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return bool(found)

    found = []
    for change in (rank_0_loads, rank_0_replaces):
        model, optimizer = network()
        state = TorchState(model=model, optimizer=optimizer)
        change(rank, model)
        with wrapping(state, on_any_rank=on_any_rank):
            DistributedDataParallel(model)
        found.append(weights(model))
    dist.destroy_process_group()
    return found


def test_what_rank_0_alone_has_changed_is_sent(tmp_path):
    """Rank 0 loads weights, or replaces a layer, so that its state has the old one: both ranks get what rank 0 has."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as ranks:
        mine, theirs = ranks.map(wrap, range(2), [tmp_path / "store"] * 2)
    assert mine == theirs
    assert [weight for weight, _ in theirs] == [[[7.0] * 4] * 3] * 2


@pytest.fixture
def rank_0_has(monkeypatch):
    """`rank_0_has(value)`: DDP receives that in all tensors."""

    def sends(value):
        def receive(_group, tensors, *_):
            for tensor in tensors:
                tensor.fill_(value)

        monkeypatch.setattr(distributed_utils, "_sync_params_and_buffers", receive)

    return sends


def committed(begun):
    """A state whose commits copy nothing."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    step(model, optimizer)
    state.commit()
    assert copies(state) == 0
    return state


def another_has_changed(_mine, _group):
    return True


def test_what_is_received_counts_as_a_change(group, begun, rank_0_has):
    """Another rank has changed its weights since the commit. This rank gets them, and knows that they are of no commit."""
    state = committed(begun)
    rank_0_has(7)
    with wrapping(state, on_any_rank=another_has_changed):
        DistributedDataParallel(state.model)
    assert weights(state.model) == [[[7.0] * 4] * 3, [7.0] * 3]
    assert not state.clean


def test_equal_values_are_no_change(group, begun):
    """DDP sends what this rank has already: the state is still that of the commit, and nothing is copied from then on."""
    state = committed(begun)
    before = collectives()
    with wrapping(state, on_any_rank=another_has_changed):
        DistributedDataParallel(state.model)
    assert collectives() > before
    assert state.clean


@pytest.mark.parametrize(("mine", "theirs", "is_clean"), [(float("nan"), float("nan"), True), (0.0, -0.0, False)])
def test_values_are_compared_by_their_bytes(group, begun, rank_0_has, mine, theirs, is_clean):
    """The same NaN on both ranks is not a change, though NaN differs from itself; a zero of the other sign is one."""
    model, optimizer = network()
    for tensor in model.parameters():
        nn.init.constant_(tensor, mine)
    state = begun(TorchState(model=model, optimizer=optimizer))
    rank_0_has(theirs)
    with wrapping(state, on_any_rank=another_has_changed):
        DistributedDataParallel(model)
    assert state.clean is is_clean


@pytest.mark.parametrize("has_copies", [False, True])
def test_a_world_that_breaks_while_ddp_sends_leaves_the_commit(group, begun, rank_0_has, has_copies):
    """What an abort leaves in the received tensors is not used: the rank still holds its commit, with and without copies."""
    state = committed(begun)
    if has_copies:
        step(state.model, state.optimizer)
        dist.all_reduce(torch.ones(1))
        state.commit()
    before = weights(state.model)
    rank_0_has(float("nan"))

    def aborted():
        raise WorldAborted

    with wrapping(state, aborted, another_has_changed), pytest.raises(WorldAborted):
        DistributedDataParallel(state.model)
    assert weights(state.model) == before
    assert state.clean
    state.generation_ended(aborted=True)
    assert weights(state.model) == before


@pytest.mark.parametrize("is_cut_off", [True, False])
def test_an_error_of_the_constructor(group, begun, monkeypatch, is_cut_off):
    """An abort leaves garbage where DDP receives the shapes of other ranks: the world is over. Else it is DDP's own error."""
    state = committed(begun)

    def refuse(*_):
        raise RuntimeError("DDP expects same model across all ranks")

    def check():
        if is_cut_off:
            raise WorldAborted

    monkeypatch.setattr(nn.parallel.distributed, "_verify_param_shape_across_processes", refuse)
    with wrapping(state, check, another_has_changed), pytest.raises(WorldAborted if is_cut_off else RuntimeError):
        DistributedDataParallel(state.model)
    assert state.clean


def test_a_break_after_the_values_were_received_returns_to_the_copies(group, begun, rank_0_has):
    """Before the first commit there are copies: a break after DDP's constructor returns to the values at the start."""
    model, optimizer = network()
    state, start = begun(TorchState(model=model, optimizer=optimizer)), weights(model)
    rank_0_has(7)
    with wrapping(state, on_any_rank=another_has_changed):
        DistributedDataParallel(model)
    assert not state.clean
    state.generation_ended(aborted=True)
    assert weights(model) == start
    assert state.clean


def test_a_model_with_more_than_the_state_has_is_sent(group, begun):
    """The constructor sends the values of a layer that is not in the state. If the world breaks then, the state is the commit's."""
    state = committed(begun)
    larger = nn.Sequential(state.model, nn.Linear(3, 2))
    before = collectives()
    with wrapping(state):
        DistributedDataParallel(larger)
    assert collectives() > before
    assert state.clean

    def aborted():
        raise WorldAborted

    with wrapping(state, aborted), pytest.raises(WorldAborted):
        DistributedDataParallel(larger)
    assert state.clean


def test_a_constructor_that_is_to_send_nothing_asks_nobody(group, begun):
    """With `init_sync=False` there is no collective: DDP may be made on some ranks only."""
    state = committed(begun)
    with wrapping(state, on_any_rank=lambda *_: pytest.fail("it asked")):
        DistributedDataParallel(state.model, init_sync=False)
    assert state.clean


@pytest.mark.parametrize("argument", ["process_group", "device_mesh"])
def test_only_the_ranks_of_the_ddps_own_group_are_asked(group, begun, argument):
    """A DDP may be made of a part of the world: the other ranks would not answer."""
    state, part, asked = committed(begun), dist.new_group([0]), []
    given = part if argument == "process_group" else DeviceMesh.from_group(part, "cpu")
    with wrapping(state, on_any_rank=lambda _, group: bool(asked.append(group))):
        DistributedDataParallel(state.model, **{argument: given})
    assert asked == [part]


def test_values_are_received_bucket_by_bucket(group, begun, monkeypatch):
    """A large model takes memory for one bucket more, and not for all of itself."""
    sizes = []
    monkeypatch.setattr(distributed_utils, "_sync_params_and_buffers", lambda _, bucket, *__: sizes.append(len(bucket)))
    with wrapping(committed(begun)):
        for size in (16, 17):  # bytes; a tensor has 8
            distributed_utils._sync_params_and_buffers(None, [torch.ones(2) for _ in range(5)], size, 0)
    assert sizes == [2, 2, 1, 3, 2]


@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters")
@pytest.mark.parametrize("options", [{}, {"static_graph": True, "find_unused_parameters": True}])
@pytest.mark.parametrize("is_training", [True, False])
def test_only_a_pass_in_which_ddp_may_receive_sizes_is_checked(group, begun, options, is_training):
    """That is its second one in a training. An evaluation before it costs nothing."""
    model, optimizer = network()
    checks = []
    with wrapping(begun(TorchState(model=model)), lambda: checks.append(1)):
        ddp = DistributedDataParallel(model, **options)
        step(ddp, optimizer)
        checks.clear()
        with torch.set_grad_enabled(is_training):
            ddp(torch.ones(2, 4))
        assert checks == [1] * is_training
    del ddp


@pytest.mark.parametrize("flag", ["_use_python_reducer", "_delay_all_reduce_all_params", "find_unused_parameters"])
def test_a_ddp_that_never_receives_sizes_is_not_checked(group, begun, flag):
    """It is compiled with torch's reducer in Python, leaves all gradients to the program, or has unused parameters."""
    checks = []
    with wrapping(committed(begun), lambda: checks.append(1)):
        ddp = DistributedDataParallel(network()[0])
        setattr(ddp, flag, True)
        checks.clear()
        ddp(torch.ones(2, 4))
    assert checks == []
    del ddp


def test_a_program_that_reduces_its_gradients_itself_is_checked_for_a_while(group, begun, monkeypatch):
    """DDP never makes its buckets then. So only the first passes of each DDP are checked, as each check takes time."""
    monkeypatch.setattr(ddp_patch, "MOST_CHECKS", 2)
    checks = []
    with wrapping(committed(begun), lambda: checks.append(1)):
        for _ in range(2):
            ddp = DistributedDataParallel(network()[0])
            checks.clear()
            with ddp.no_sync():
                for _ in range(4):
                    ddp(torch.ones(2, 4)).sum().backward()
            assert len(checks) == 2
    del ddp


def test_what_is_no_module_is_left_to_ddp(group, begun):
    """The other ranks, which may have given a module, are asked all the same: none waits for this one."""
    asked = []
    with wrapping(committed(begun), on_any_rank=lambda mine, _: asked.append(mine)), pytest.raises(AttributeError):
        DistributedDataParallel("model")
    assert asked == [True]
