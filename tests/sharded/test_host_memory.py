"""Memory for copies outlives the process that filled it, as long as another process of the host has mapped it."""

import multiprocessing
import os
import signal

import pytest
import torch

from nbelastic.errors import StateError
from nbelastic.sharded.arena import Arena, Arenas, ShardTensor
from nbelastic.sharded.host_memory import HostMemory, Offer, Offered, offer
from nbelastic.sharded.whole_commits import Commit, Held

NAMES = (ShardTensor("w"), ShardTensor("w", "optimizer", "exp_avg", "bfloat16"))
SHAPES = [(3, 5), (3, 5)]
COMMIT = Commit(2, 7)


def shard(value):
    return {name: torch.full((3, 5), value, dtype=getattr(torch, name.dtype)) for name in NAMES}


def _fill_and_wait(connection):
    arena = Arena(NAMES, SHAPES)
    arena.fill(shard(1.5), COMMIT)
    connection.send(offer({4: [arena]}))
    connection.recv()  # until it is killed


@pytest.fixture
def other():
    """Another process with a filled arena, and what it offers."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_fill_and_wait, args=(theirs,))
    process.start()
    yield process, ours.recv()
    process.kill()
    process.join()


def test_a_copy_outlives_its_process(other):
    """Another worker of the host maps the arena, its process is killed, and the copy is still there."""
    process, offered = other
    host = HostMemory(["a", "a"], 0)
    host.map([Offer(os.getpid()), offered], NAMES, lambda _: SHAPES)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (held, copy), *rest = host.held().items()
    assert held == Held(COMMIT, 4)
    assert not rest
    assert all(torch.equal(copy[name], tensor) for name, tensor in shard(1.5).items())


def test_an_arena_that_is_being_written_holds_nothing(other):
    """A worker that dies while it copies leaves no copy that another worker would take for a whole one."""
    _, offered = other
    host = HostMemory(["a", "a"], 1)
    host.map([offered, Offer(0)], NAMES, lambda _: SHAPES)
    arena = Arena(NAMES, SHAPES)
    arena.fill(shard(2.0), COMMIT)
    assert arena.commit == COMMIT
    arena.unseal()
    assert arena.commit is None


def test_workers_of_other_hosts_are_not_mapped():
    """Their process numbers mean other processes here."""
    host = HostMemory(["a", "b"], 0)
    host.map([Offer(1), Offer(1, (Offered(1, 3),))], NAMES, lambda _: SHAPES)
    assert host.held() == {}
    assert not host.unreachable


def test_an_arena_that_cannot_be_opened_is_reported():
    """Then the ranks send copies instead."""
    host = HostMemory(["a", "a"], 0)
    host.map([Offer(1), Offer(os.getpid(), (Offered(1, 9999),))], NAMES, lambda _: SHAPES)
    assert host.unreachable


def test_two_arenas_are_used_in_turn():
    """The one that was filled last keeps the last whole commit while the other is written."""
    arenas = Arenas(NAMES, SHAPES)
    first, second, third = (arenas.take() for _ in range(3))
    assert first is third
    assert first is not second
    assert arenas.nbytes == 2 * first.nbytes


def test_without_memory_the_error_says_how_much_is_missing(monkeypatch):
    """The system would kill the process; the error comes first, and names what to do."""
    monkeypatch.setattr("nbelastic.sharded.arena.free_on_machine", lambda: 100)
    with pytest.raises(StateError, match=r"2 ranks of this host need one now.*ShardedState\(copies=0\)"):
        Arena(NAMES, SHAPES, processes=2)
