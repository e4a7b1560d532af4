"""Groups of rank 0, formed without any driver."""

import threading
import time

import torch
import torch.distributed as dist

from nbelastic.worker.formation import Formation
from nbelastic.worker.next_generation import NextGeneration
from nbelastic.worker.process_group import Group, Offer


def formation(generation, size, offer):
    return Formation(generation, 0, size, 0, size, 0, 1, offer.endpoint, 0, (), (("a", size),))


def form(generation, size, *, abort_after=None):
    """Form generation `generation` as rank 0 of `size`. Returns the group."""
    group, offer, over = Group(generation), Offer("127.0.0.1"), threading.Event()

    def abort():
        time.sleep(abort_after)
        while not over.wait(0.02):
            group.abort()

    thread = threading.Thread(target=abort)
    if abort_after is not None:
        thread.start()
    try:
        group.form(formation(generation, size, offer), offer, NextGeneration("127.0.0.1").run)
    finally:
        over.set()
        if abort_after is not None:
            thread.join()
        if group.connections is not None and not dist.is_initialized():
            group.leave()
    return group


def works():
    """Whether a collective in the default group gives the right result."""
    one = torch.ones(3)
    dist.all_reduce(one)
    return one.tolist() == [1.0] * 3
