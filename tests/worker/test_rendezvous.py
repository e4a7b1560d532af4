"""Forming, aborting and leaving an epoch's group, without any driver."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from nbelastic.core.messages import Formation
from nbelastic.worker.rendezvous import Group, Offer, _shut_down


def formation(epoch, size, offer):
    return Formation(epoch, 0, size, 0, size, 0, 1, offer.endpoint, 0, (), (("a", size),))


def form(epoch, size, *, abort_after=None):
    """Form epoch `epoch` as rank 0 of `size`; the group."""
    group, offer, over = Group(epoch, torch.device("cpu"), "gloo"), Offer("127.0.0.1"), threading.Event()

    def abort():
        time.sleep(abort_after)
        while not over.wait(0.02):
            group.abort()

    thread = threading.Thread(target=abort)
    if abort_after is not None:
        thread.start()
    try:
        group.form(formation(epoch, size, offer), offer)
    finally:
        over.set()
        if abort_after is not None:
            thread.join()
        if group._reach is not None and not dist.is_initialized():
            group.leave()
    return group


def test_a_forming_that_waits_for_others_can_be_aborted():
    """The others never come: an abort from another thread makes it raise at once."""
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        form(1, 2, abort_after=0.2)
    assert time.monotonic() - began < 2
    assert not dist.is_initialized()


def test_a_failed_forming_leaves_no_trace_in_the_next():
    """Survivors of a forming that failed meet newcomers, who saw none, under the same keys of the store."""
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


def test_a_descriptor_that_was_given_to_another_file_is_left_alone(tmp_path):
    """A connection closed between being listed and being shut down: its number may name any file now, which stays open."""
    with (tmp_path / "file").open("w") as file:
        before = len(os.listdir("/proc/self/fd"))
        _shut_down(file.fileno(), "socket:[1]")
        assert len(os.listdir("/proc/self/fd")) == before
        file.write("still open")


def test_a_peer_that_never_connects_costs_a_thread_only():
    """The other rank has given its address and is gone: gloo waits for its call and cannot be woken. It is left behind."""

    class EnoughError(Exception):
        pass

    def enough():
        if time.monotonic() - began > 0.5:
            raise EnoughError

    group, offer = Group(1, torch.device("cpu"), "gloo"), Offer("127.0.0.1")
    began = time.monotonic()
    with pytest.raises(EnoughError):
        group.form(formation(1, 2, offer), offer, enough)
    assert time.monotonic() - began < 1
    group.leave()
    after = form(2, 1)
    dist.all_reduce(torch.ones(1))
    after.leave()
