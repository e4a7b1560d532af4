"""Forming and aborting a generation's group, without any driver."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from nbelastic.worker.next_generation import NextGeneration
from nbelastic.worker.process_group import TIMEOUT, Group, Offer
from tests.worker.forming import form, formation, works


def test_a_forming_that_waits_for_others_can_be_aborted():
    """The other ranks never connect: an abort from another thread makes `form` raise at once."""
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        form(1, 2, abort_after=0.2)
    assert time.monotonic() - began < 20  # the group's own timeout is half an hour
    assert not dist.is_initialized()


def test_a_failed_forming_leaves_no_trace_in_the_next():
    """Survivors of a failed forming meet newcomers under the same keys of the store."""
    with pytest.raises(RuntimeError):
        form(1, 2, abort_after=0.1)
    group = form(2, 1)
    try:
        assert dist.distributed_c10d._get_default_group().group_name == "0"
        one = torch.ones(1)
        dist.all_reduce(one)
        assert one.item() == 1
    finally:
        group.leave()
    assert not dist.is_initialized()


def test_a_group_that_cannot_be_shut_down_is_forgotten(monkeypatch):
    """Torch raises while it shuts down an aborted group: the next generation's group can be formed all the same."""

    def broken(_):
        raise RuntimeError("connection closed")

    group = form(1, 1)
    monkeypatch.setattr(dist.ProcessGroup, "shutdown", broken)
    group.leave()
    assert not dist.is_initialized()
    form(2, 1).leave()


def test_a_peer_that_never_connects_costs_a_thread_only():
    """The other rank has published its address and is lost. Gloo cannot be woken: its thread is abandoned."""

    class StoppedWaitingError(Exception):
        pass

    def stop_waiting():
        if time.monotonic() - began > 0.5:
            raise StoppedWaitingError

    group, offer = Group(1), Offer("127.0.0.1")
    began = time.monotonic()
    with pytest.raises(StoppedWaitingError):
        group.form(formation(1, 2, offer), offer, NextGeneration("127.0.0.1").run, stop_waiting)
    assert time.monotonic() - began < 20
    group.leave()
    after = form(2, 1)
    dist.all_reduce(torch.ones(1))
    after.leave()


def test_what_torch_makes_of_a_spoiled_store_is_a_failed_forming(monkeypatch):
    """If another process changes the store's keys, torch raises any error. The program did not cause it."""

    def spoiled(*_):
        raise ValueError("basic_string::_M_create")

    monkeypatch.setattr(Group, "_init", spoiled)
    with pytest.raises(RuntimeError, match="could not be formed: ValueError: basic_string"):
        form(1, 1)


def test_a_forming_that_was_left_behind_does_not_become_the_default_group(monkeypatch):
    """Its peer connects late, when the next generation's group trains already: that group stays the default."""

    class StoppedWaitingError(Exception):
        pass

    def stop_waiting():
        if hanging.acquire(blocking=False):
            raise StoppedWaitingError

    held, hanging, made = threading.Event(), threading.Semaphore(0), threading.Event()
    make = Group._make_first

    def late(group, store, rank, size, timeout=TIMEOUT):
        """The other rank connects late: here the group then has one member."""
        hanging.release()
        held.wait()
        made.set()
        return make(group, store, rank, 1, timeout)

    next_generation, offer = NextGeneration("127.0.0.1"), Offer("127.0.0.1")
    others = threading.enumerate()
    with monkeypatch.context() as patch:
        patch.setattr(Group, "_make_first", late)
        group = Group(1)
        with pytest.raises(StoppedWaitingError):
            group.form(formation(1, 2, offer), offer, next_generation.run, stop_waiting)
        (abandoned,) = {thread for thread in threading.enumerate() if "nbelastic-prepare" in thread.name} - {*others}
        next_generation.abandon_thread()
        group.leave()
    following = form(2, 1)
    default = dist.group.WORLD
    held.set()
    abandoned.join(20)
    assert made.is_set()
    assert dist.group.WORLD is default
    assert works()
    assert following.is_intact()
    following.leave()


def test_options_that_a_newer_torch_gives_are_taken():
    """torch 2.15 makes gloo groups with `enable_reconfigure`: the option is accepted, and ignored."""
    group = form(1, 1)
    made = dist.distributed_c10d.ProcessGroupGloo(group._store, 0, 1, timeout=TIMEOUT, enable_reconfigure=False)
    group.leave()
    assert made.size() == 1
