"""Transfers that break off: the state that a receiver then holds, and its report."""

import contextlib

import pytest
import torch

from nbelastic import TorchState
from nbelastic.state import memory, transfer
from nbelastic.state.memory import fits
from nbelastic.state.transfer import describe
from nbelastic.worker import warm_up as warm
from nbelastic.worker.worker_report import WorkerFacts
from tests.state.conftest import FakeSession, formation
from tests.support.nccl_double.accelerator import Double
from tests.support.nccl_double.communicator import live as communicators

CPU = torch.device("cpu")


class BrokenChannel:
    """Its sender is lost when half of the tensors have arrived."""

    device, is_on_accelerator = CPU, False

    def move_tensors(self, tensors):
        for tensor in tensors[: len(tensors) // 2]:
            tensor.fill_(6)
        raise RuntimeError("Connection closed by peer")


class WholeChannel:
    """Everything arrives; it records what the receiver's live tensors hold meanwhile."""

    device, is_on_accelerator = CPU, False

    def __init__(self, live):
        self.live, self.meanwhile = live, []

    def move_tensors(self, tensors):
        for tensor in tensors:
            tensor.fill_(6)
        self.meanwhile = [tensor.tolist() for tensor in self.live]


def holder():
    facts = WorkerFacts()
    facts.holds_state = True
    return facts, [torch.full((2,), 5.0) for _ in range(4)]


def receive(channel, places, facts):
    with contextlib.suppress(RuntimeError):
        transfer.receive(channel, places, facts, lambda task: task(), 1)


def test_a_holder_keeps_its_commit_when_the_sender_dies():
    facts, live = holder()
    receive(BrokenChannel(), live, facts)
    assert facts.holds_state
    assert [tensor.tolist() for tensor in live] == [[5, 5]] * 4


def test_nothing_live_changes_before_all_has_come():
    facts, live = holder()
    channel = WholeChannel(live)
    receive(channel, live, facts)
    assert channel.meanwhile == [[5, 5]] * 4
    assert [tensor.tolist() for tensor in live] == [[6, 6]] * 4


class AbortedChannel(WholeChannel):
    """Everything seems to arrive; then the check finds that the generation is over."""

    def move_tensors(self, tensors):
        super().move_tensors(tensors)
        raise RuntimeError("the generation is over")


def test_an_aborted_transfer_is_not_used(monkeypatch):
    """After an aborted transfer a holder keeps its tensors; a rank that received in place holds nothing."""
    facts, live = holder()
    receive(AbortedChannel(live), live, facts)
    assert facts.holds_state
    assert [tensor.tolist() for tensor in live] == [[5, 5]] * 4
    monkeypatch.setattr(transfer, "fits", lambda *_: False)
    receive(AbortedChannel(live), live, facts)
    assert not facts.holds_state


def test_after_a_failed_allocation_the_transfer_continues_in_place(monkeypatch):
    """After a failed allocation, as on a fragmented GPU, the transfer continues in place."""

    def no_memory(place):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty_like", no_memory)
    facts, live = holder()
    channel = WholeChannel(live)
    receive(channel, live, facts)
    assert channel.meanwhile == [[6, 6]] * 4


def test_unknown_free_memory_counts_as_none(monkeypatch):
    """Unknown free memory, as in some sandboxes, leaves no room for a second copy."""

    def unknown():
        raise FileNotFoundError

    monkeypatch.setattr(memory, "free_on_machine", unknown)
    assert not fits([Huge(1)], CPU, 1)


def test_without_memory_for_it_a_holder_says_that_it_holds_nothing_any_more(monkeypatch):
    monkeypatch.setattr(transfer, "fits", lambda *_: False)
    facts, live = holder()
    receive(BrokenChannel(), live, facts)
    assert not facts.holds_state
    assert live[0].tolist() != live[-1].tolist()


def test_a_newcomer_receives_in_place():
    """A newcomer without a state receives in place, without a second copy."""
    live = [torch.zeros(2) for _ in range(4)]
    channel = WholeChannel(live)
    receive(channel, live, WorkerFacts())
    assert channel.meanwhile == [[6, 6]] * 4


class Huge:
    """A tensor's size and device."""

    def __init__(self, nbytes, device="cpu"):
        self.nbytes, self.device = nbytes, torch.device(device)


def test_what_fits_is_shared_by_the_processes_of_a_machine(monkeypatch):
    """Half of the free memory is used, and each receiver on this machine takes the same amount."""
    monkeypatch.setattr(memory, "free_on_machine", lambda: 1000)
    assert fits([Huge(100), Huge(150)], CPU, 2)
    assert not fits([Huge(100), Huge(151)], CPU, 2)
    assert fits([Huge(10**6, "meta")], CPU, 2)


def test_a_control_group_bounds_the_free_memory(monkeypatch, tmp_path):
    """A container's limit less its use bounds the free memory; memory of files counts as free."""
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 300000\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    assert memory.free_on_machine() == 400_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_on_machine() > 400_000


def test_what_torch_keeps_of_a_gpus_memory_counts_as_free(monkeypatch):
    """torch gives memory that it has reserved, and does not use, to the copies. Half of all that is free is used."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 200)
    gpu = torch.device("cuda")
    assert fits([Huge(150, gpu), Huge(50, gpu)], gpu, 2)
    assert not fits([Huge(150, gpu), Huge(51, gpu)], gpu, 2)


def test_a_warm_up_that_fails_leaves_no_group_behind(monkeypatch):
    """A failed warm-up leaves no group, so that the first world can make its default group."""

    def fail():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(warm, "_train", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        warm._use_torch()
    assert not torch.distributed.is_initialized()


def test_a_gpu_that_cannot_be_warmed_up_is_named(capsys):
    """One line in the worker's log; the worker goes on, as the program may not need that GPU."""

    def fail():
        raise RuntimeError("no kernel image is available")

    warm._try("the GPU", fail)
    assert capsys.readouterr().err == (
        "nbelastic: warming up the GPU failed: RuntimeError: no kernel image is available\n"
    )


def test_nccl_is_warmed_up_by_a_communicator_of_one():
    """It connects, and is aborted in any case: nothing of it is left when the first world forms."""
    warm._use_accelerator(Double())
    assert not communicators
    calls = []

    class Broken(Double):
        def connect(self, communicator, meet):
            raise RuntimeError("no interface")

        def abort(self, communicator):
            calls.append("abort")
            super().abort(communicator)

    with pytest.raises(RuntimeError, match="no interface"):
        warm._use_accelerator(Broken())
    assert calls == ["abort"]


def test_a_warm_up_draws_no_random_number():
    """The program's first numbers are those of its seed."""
    before = torch.get_rng_state()
    warm._use_device(CPU)
    warm._use_torch()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_setup_cell_may_seed_during_the_warm_up(monkeypatch):
    """The main thread runs it while the warm-up's thread makes its model: the seed stays."""
    make = torch.nn.ReLU

    def seeded():
        torch.manual_seed(5)
        return make()

    monkeypatch.setattr(torch.nn, "ReLU", seeded)
    warm._use_torch()
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(5).get_state())


class DyingSender:
    """It describes its state, of the next commit, and is lost when half of the tensors have arrived."""

    receives, device, is_on_accelerator, move_tensors = True, CPU, False, BrokenChannel.move_tensors

    def __init__(self, sender):
        self.described = {**describe(sender._live(), []), "commits": sender.commits + 1}

    def move_object(self, _):
        return self.described


def trained(begun, *, steps, holds=True):
    """A state at its first commit, after `steps` steps, and its contents."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = FakeSession()
    session.facts.holds_state = holds
    state = begun(TorchState(model=model, optimizer=optimizer, mean=torch.ones(3)), session)
    for _ in range(steps):
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
    state.commit()
    return state, contents(state)


def contents(state):
    tensors = []
    described = describe(state._live(), tensors)
    return str(described), [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize(
    ("steps", "holds", "still"),
    [(2, True, True), (1, True, False), (2, False, False)],
    ids=["copies", "no copies", "newcomer"],
)
def test_a_holder_with_copies_goes_back_to_them_when_a_transfer_in_place_breaks_off(
    begun, monkeypatch, steps, holds, still
):
    """It still holds its commit, and reports so. Without copies, or before it held a state, it holds nothing."""
    monkeypatch.setattr(transfer, "fits", lambda *_: False)
    state, before = trained(begun, steps=steps, holds=holds)
    with pytest.raises(RuntimeError, match="Connection closed"):
        state._transfer(DyingSender(state), formation(0, 1))
    assert state._session.facts.holds_state is still
    assert (contents(state) == before) is still
    assert state.commits == 1
