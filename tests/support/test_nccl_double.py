"""The double of NCCL behaves as NCCL does. Each rank is a thread here."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nbelastic.worker.threads import run_in_thread
from tests.support.nccl_double import communicator, mesh
from tests.support.nccl_double.accelerator import Double
from tests.support.nccl_double.group import NcclDouble
from tests.support.waiting import until

TIMEOUT = timedelta(minutes=5)


def connect(group):
    Double().connect(group, lambda: None)


@pytest.fixture
def form(monkeypatch):
    """Make the groups of a new world, one for each rank. They are aborted at the end."""
    monkeypatch.setattr(mesh, "gpu", lambda: str(threading.get_ident()))
    made = []

    def make(size=2, timeout=TIMEOUT):
        store = dist.HashStore()
        groups = [Double().create(store, rank, size, timeout) for rank in range(size)]
        made.extend(groups)
        with ThreadPoolExecutor(size) as threads:
            list(threads.map(connect, groups))
        return groups

    yield make
    for group in made:
        group.abort()


def test_works_run_later_and_in_order(form):
    """A work is only begun when its call returns. It ends when all ranks have begun it, after those before it."""
    first, second = form()
    tensors = [torch.ones(4), torch.ones(100_000)]
    works = [first.allreduce([tensor]) for tensor in tensors]
    assert not any(work.is_completed() for work in works)
    second.allreduce([torch.ones(4)])
    works[0].wait()
    assert tensors[0].eq(2).all()
    assert not works[1].is_completed()
    assert tensors[1].eq(1).all()
    second.allreduce([torch.ones(100_000)])
    assert works[1].get_future().wait() == [tensors[1]]
    assert tensors[1].eq(2).all()
    assert first._get_sequence_number_for_group() == 2


def test_an_abort_ends_all_works_with_garbage(form):
    """After an abort in another thread `wait` returns as ever, and some outputs have neither the old nor the right value."""
    group, _ = form()
    outputs = [torch.ones(100) for _ in range(20)]
    works = [group.allreduce([output]) for output in outputs]
    waiting = run_in_thread(lambda: [work.wait() for work in works])
    aborting = run_in_thread(group.abort)
    assert waiting.result(10) == [True] * len(works)
    aborting.result(10)
    damaged = [output for output in outputs if not output.eq(1).all()]
    assert 0 < len(damaged) < len(outputs)
    assert any(output.eq(1).any() for output in damaged)  # a part of it was written
    with pytest.raises(dist.DistBackendError, match="aborted"):
        group.allreduce([torch.ones(1)])


def test_a_synchronisation_waits_for_all_works(form):
    """It waits also for works that no rank has waited for, and ends without an error if they were aborted."""
    group, other = form()
    group.broadcast([torch.ones(1)], dist.BroadcastOptions())
    group.barrier()
    waiting = run_in_thread(Double().synchronize)
    other.broadcast([torch.ones(1)], dist.BroadcastOptions()).wait()
    assert not waiting.done()
    group.abort()
    waiting.result(10)


@pytest.mark.parametrize("sees", [True, False])
def test_a_lost_peer_makes_works_hang(form, sees):
    """No rank raises: a work that lacks its peer ends only with an abort. The watchdog sees the error on some transports."""
    group, peer, third = form(3)
    group.communicator._sees_lost_peers = sees
    group.communicator._mode = group.communicator._dump_time = 0
    works = [one.allreduce([torch.ones(1)]) for one in (group, third)]
    peer.abort()
    if sees:
        until(lambda: "remote error: rank 1" in Double().error(group))
    until(lambda: group.communicator._lost)
    assert not any(work.is_completed() for work in works)
    group.abort()
    assert works[0].wait()
    assert not works[1].is_completed()


def test_a_work_that_takes_too_long_is_an_error(form):
    """The watchdog records a timeout; the work goes on waiting."""
    group, _ = form(timeout=timedelta(milliseconds=1))
    group.communicator._mode = group.communicator._dump_time = 0
    work = group.allreduce([torch.ones(1)])
    assert until(lambda: Double().error(group)) == "timeout"
    assert not work.is_completed()


@pytest.mark.parametrize(("mode", "ends"), [("0", False), ("1", True), ("2", False), ("3", True)])
def test_the_watchdog_acts_first(form, monkeypatch, mode, ends):
    """It holds the lock that new works need, four times as long as the variable says. Then some modes end the process."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", mode)
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")
    asleep, done, ended = [], threading.Event(), []

    def sleep(seconds):
        if seconds != communicator.ABORT_TIME:
            asleep.append(seconds)
            done.wait()

    monkeypatch.setattr(communicator, "sleep", sleep)
    monkeypatch.setattr(communicator.os, "abort", lambda: ended.append(True))
    group, _ = form(timeout=timedelta(milliseconds=1))
    first = group.allreduce([torch.ones(1)])
    until(lambda: asleep == [2.0])
    assert Double().error(group) == "timeout"
    assert group.communicator._mutex.locked()
    done.set()
    if ends:
        until(lambda: ended)
    elif mode == "2":
        first.wait()
    assert bool(ended) == ends


def test_an_abort_waits_for_a_group_that_connects(form, monkeypatch):
    """A member is missing: torch holds a lock until its own timeout, and the abort needs that lock."""
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "0.5")
    group = Double().create(dist.HashStore(), 0, 2, TIMEOUT)
    connecting = run_in_thread(lambda: connect(group))
    until(group.communicator._waiting.locked)
    aborting = run_in_thread(group.abort)
    with pytest.raises(dist.DistBackendError, match="timeout"):
        connecting.result(10)
    aborting.result(10)
    assert group.communicator not in communicator.live


def test_an_abort_reaches_a_group_whose_members_have_not_met(form):
    """It has begun to connect, and does not wait for its peers yet."""
    group, may_go_on = Double().create(dist.HashStore(), 0, 2, TIMEOUT), threading.Event()
    connecting = run_in_thread(lambda: Double().connect(group, may_go_on.wait))
    until(lambda: group.communicator in communicator.live)
    group.abort()
    may_go_on.set()
    with pytest.raises(dist.DistBackendError, match="aborted while it was made"):
        connecting.result(10)
    assert group.communicator not in communicator.live


def test_a_peer_that_dies_ends_connecting(form):
    """Its connections break: the others raise at once."""
    store, size = dist.HashStore(), 3
    groups = [Double().create(store, rank, size, TIMEOUT) for rank in range(size)]
    both = threading.Barrier(size)
    survivors = [run_in_thread(lambda one=one: Double().connect(one, both.wait)) for one in groups[:2]]
    dying = groups[2].communicator._mesh
    dying.begin(store)
    both.wait()
    for rank in range(2):
        name = json.loads(store.get(f"member/{rank}"))
        dying._reach(name["host"], name["port"], store.get("token")).close()
    for one in survivors:
        with pytest.raises(dist.DistBackendError, match="remote error: rank 2"):
            one.result(10)
    dying.close()
    for group in groups:
        group.abort()


def test_no_abort_reaches_a_group_that_connects_blocking(form):
    """As torch makes groups by default: `connect` goes on waiting for the member that is missing."""
    store = dist.HashStore()
    groups = [NcclDouble(store, rank, 2, TIMEOUT, blocking=True) for rank in range(2)]
    connecting = run_in_thread(groups[0].communicator.connect)
    until(lambda: store.check(["member/0"]))
    groups[0].abort()
    assert not connecting.done()
    groups[1].communicator.connect()
    connecting.result(10)
    for group in groups:
        group.abort()


def test_an_abort_does_not_reach_other_groups(form):
    """A group that was made from another one holds its memory until it is aborted itself."""
    parents, children = form(), form()
    works = [group.allreduce([torch.ones(1)]) for group in (parents[0], children[0])]
    parents[0].abort()
    works[0].wait()
    assert not works[1].is_completed()
    assert parents[0].communicator not in communicator.live
    assert children[0].communicator in communicator.live
    children[1].allreduce([torch.ones(1)])
    works[1].wait()


def test_two_ranks_on_one_gpu_are_refused(form, monkeypatch):
    """All ranks raise when two of them use the same GPU of one machine."""
    monkeypatch.setattr(mesh, "gpu", lambda: "GPU-1")
    with pytest.raises(
        dist.DistBackendError, match="Duplicate GPU detected : rank 1 and rank 0 both on CUDA device GPU-1"
    ):
        form()


def test_a_shutdown_waits_for_the_other_ranks(form):
    """It ends when all ranks have called it. If one is lost, it hangs until an abort."""
    groups = form()
    closing = run_in_thread(groups[0].shutdown)
    groups[1].shutdown()
    closing.result(10)
    groups = form()
    closing = run_in_thread(groups[0].shutdown)
    groups[1].abort()
    until(lambda: groups[0].communicator._lost)
    assert not closing.done()
    groups[0].abort()
    closing.result(10)


@pytest.mark.soak(share=0.2)
def test_torch_trains_on_it(tmp_path):
    """All collectives work, and DDP and FSDP2 reach the same weights on all ranks."""
    command = [sys.executable, "-m", "tests.support.nccl_double.ranks", tmp_path / "store"]
    subprocess.run(command, check=True, timeout=100)
