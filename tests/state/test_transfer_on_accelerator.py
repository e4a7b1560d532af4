"""Transfers whose operations end later, and after an abort end with garbage and without an error: shown on the double of NCCL."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from nbelastic.state import transfer
from nbelastic.state.transfer import Channel
from nbelastic.worker.interrupts import WorldAborted
from nbelastic.worker.threads import run_in_thread
from nbelastic.worker.worker_report import WorkerFacts
from tests.support.nccl_double import mesh
from tests.support.nccl_double.accelerator import Double

SIZE = 4
CPU = torch.device("cpu")


class World:
    """One group of the double per rank; each rank is a thread here. `abort()` as an aborted generation does it."""

    def __init__(self):
        store = dist.HashStore()
        self.groups = [Double().create(store, rank, SIZE, timedelta(minutes=5)) for rank in range(SIZE)]
        self.is_over = False
        with ThreadPoolExecutor(SIZE) as threads:
            list(threads.map(lambda group: Double().connect(group, lambda: None), self.groups))
        for group in self.groups:
            distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(SIZE)}

    def channels(self, root, receivers):
        """The channel of each rank."""
        made = []
        for rank, group in enumerate(self.groups):
            distributed_c10d._world.default_pg = group
            made.append(Channel(root, receivers, rank, SIZE, CPU, check=self.check(group)))
        distributed_c10d._world.default_pg = None
        return made

    def check(self, group):
        def check():
            group.communicator.synchronize()
            if self.is_over:
                raise WorldAborted

        return check

    def abort(self):
        self.is_over = True
        for group in self.groups:
            group.abort()


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(mesh, "gpu", lambda: str(threading.get_ident()))
    made = World()
    yield made
    made.abort()
    for group in made.groups:
        del distributed_c10d._world.pg_group_ranks[group]


def test_it_goes_from_rank_to_rank_in_pieces(world, monkeypatch):
    """Each receiver passes on what it gets; a rank that needs nothing takes no part, and its tensors are not touched."""
    monkeypatch.setattr(transfer, "PIECE", 1000)
    monkeypatch.setattr(transfer, "LARGE", 4000)
    monkeypatch.setattr(transfer, "PACKED", 2000)
    root, receivers = 2, (3, 0)
    channels = world.channels(root, receivers)
    shapes = [(3,), (50, 60), (7, 7), (), (40, 70), (0,), (999,)]
    tensors = [[torch.full(shape, float(rank)) for shape in shapes] for rank in range(SIZE)]
    for mine in tensors:
        mine[1] = mine[1].t()  # it has to be packed

    def move(rank):
        described = channels[rank].move_object({"a": [1, "x"]} if rank == root else None)
        channels[rank].move_tensors(tensors[rank])
        return described

    assert [one.takes_part for one in channels] == [True, False, True, True]
    with ThreadPoolExecutor(SIZE) as threads:
        assert list(threads.map(move, (root, *receivers))) == [{"a": [1, "x"]}] * 3
    values = {rank: {float(x) for t in tensors[rank] for x in t.reshape(-1)} for rank in range(SIZE)}
    assert values == {0: {2.0}, 1: {1.0}, 2: {2.0}, 3: {2.0}}
    assert world.groups[1].communicator.begun == 0


def test_a_description_that_an_abort_has_cut_off_is_not_read(world, monkeypatch):
    """The length and the text may be garbage: no memory of that size is allocated, and nothing is decoded."""
    monkeypatch.setattr(transfer, "from_bytes", lambda _: pytest.fail("it was decoded"))
    channel = world.channels(0, (1,))[1]
    monkeypatch.setattr(channel, "move", in_turn(channel.move, pytest.fail))
    receiving = run_in_thread(lambda: channel.move_object(None))
    world.abort()
    with pytest.raises(WorldAborted):
        receiving.result(10)


def in_turn(*functions):
    """A function that calls the next one of these each time."""
    following = iter(functions)

    def call(*args):
        return next(following)(*args)

    return call


def test_a_state_that_an_abort_has_cut_off_leaves_the_live_tensors_alone(world):
    """A rank that holds a commit receives into new memory: what an abort leaves there is not used."""
    channel, facts = world.channels(0, (1,))[1], WorkerFacts()
    facts.holds_state = True
    live = [torch.full((1 << 19,), 5.0) for _ in range(4)]
    receiving = run_in_thread(lambda: transfer.receive(channel, live, facts, lambda task: task(), 1))
    world.abort()
    with pytest.raises(WorldAborted):
        receiving.result(10)
    assert facts.holds_state
    assert all(tensor.eq(5).all() for tensor in live)


@pytest.mark.parametrize("on_accelerator", [True, False])
def test_a_newcomer_receives_from_nccl_in_a_thread_of_its_own(world, monkeypatch, on_accelerator):
    """An abort within a batch leaves NCCL's group calls of that thread open: later ones of the main thread would never begin.

    Gloo may still write after an abort. So the main thread waits for it.
    """
    channel, threads = world.channels(0, (1,))[1], []
    monkeypatch.setattr(channel, "_on_accelerator", lambda _: on_accelerator)
    monkeypatch.setattr(channel, "move_tensors", lambda _: threads.append(threading.current_thread()))
    transfer.receive(channel, [torch.zeros(1)], WorkerFacts(), lambda task: run_in_thread(task).result(10), 1)
    assert [one is threading.main_thread() for one in threads] == [not on_accelerator]
