"""The communicators of a device, beside gloo's groups: made in the preparing thread, aborted in their own, kept, ended."""

import gc
import threading
import weakref
from concurrent.futures import wait
from functools import partial

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore

from nbelastic.protocol.settings import NCCL_DEFAULTS
from nbelastic.protocol.timeouts import Timeouts
from nbelastic.worker.accelerator import ABORT_TIMEOUT, Communicators
from nbelastic.worker.groups import Groups
from nbelastic.worker.hang_detector import GPU_HANG_TIMEOUT
from nbelastic.worker.next_generation import NextGeneration
from nbelastic.worker.process_group import TIMEOUT, Group, Offer
from nbelastic.worker.threads import run_in_thread
from tests.support.waiting import until
from tests.worker.forming import formation, works


class FakeAccelerator:
    """Torch makes gloo groups only; a communicator is a number, and each call is recorded with its thread's name."""

    backend = "gloo"

    def __init__(self):
        self.calls, self.aborted, self.errors, self.make = [], [], {}, None
        self.has_room = True
        self.connecting, self.may_connect = threading.Event(), threading.Event()
        self.may_connect.set()

    def options(self, timeout):
        return timeout

    def create(self, store, rank, size, options):
        self.calls.append(("create", threading.current_thread().name.split("_")[0]))
        return [len(self.calls)]

    def make_room(self):
        return self.has_room

    def connect(self, communicator, meet):
        meet()
        self.connecting.set()
        self.may_connect.wait()
        if communicator in self.aborted:
            raise RuntimeError("aborted")

    def abort(self, communicator):
        self.aborted.append(communicator)
        self.may_connect.set()

    def error(self, communicator):
        return self.errors.get(communicator[0], "")

    def synchronize(self, *, all_streams=False):
        self.calls.append(("synchronize", all_streams))

    def use_for_new_groups(self, make):
        self.make = make


@pytest.fixture
def device():
    return FakeAccelerator()


def formed(device, generation=1):
    """A group of one rank with a communicator of `device`."""
    group, offer = Group(generation, device), Offer("127.0.0.1")
    group.form(formation(generation, 1, offer), offer, NextGeneration("127.0.0.1").run)
    return group


def test_a_communicator_is_made_in_the_preparing_thread_and_handed_to_torch_once(device):
    """Torch asks for the default group's, which is there already; each later group gets a new one."""
    group = formed(device)
    assert device.calls == [("create", "nbelastic-prepare")]
    first, second = (device.make(None, 0, 1, TIMEOUT) for _ in range(2))
    assert (first, second) == ([1], [2])
    assert works()
    group.leave()
    assert device.make is None
    assert not dist.is_initialized()


def test_an_abort_reaches_each_communicator_once_and_in_a_thread_of_its_own(device):
    """However often the generation is aborted; one that is made later is aborted too."""
    group = formed(device)
    device.make(None, 0, 1, TIMEOUT)
    device.make(None, 0, 1, TIMEOUT)
    threads = set()
    device.abort = lambda communicator: (
        threads.add(threading.current_thread().name),
        device.aborted.append(communicator),
    )
    for _ in range(3):
        group.abort()
    device.make(None, 0, 1, TIMEOUT)
    group.abort()
    until(lambda: len(device.aborted) == 3)
    assert threads == {"nbelastic-abort"}
    group.leave()
    assert sorted(device.aborted) == [[1], [2], [3]]


def test_a_group_is_left_while_another_thread_begins_its_abort(device, monkeypatch):
    """The main thread leaves in the moment in which the link thread aborts: torch has no group, and the abort is waited for."""
    group = formed(device)
    start, starting, may_start = threading.Thread.start, threading.Event(), threading.Event()

    def start_late(thread):
        if thread.name == "nbelastic-abort":
            starting.set()
            may_start.wait(10)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    aborting = run_in_thread(group.abort)
    starting.wait()
    communicators = group.leave()
    assert not dist.is_initialized()
    assert not communicators.wait(0.05)
    may_start.set()
    assert communicators.wait(10)
    assert device.aborted == [[1]]
    aborting.result(10)


def test_an_abort_ends_a_communicator_that_connects(device):
    """A member was lost while the group forms: forming raises, as the communicator was known before it connected."""
    device.may_connect.clear()
    group, offer = Group(1, device), Offer("127.0.0.1")
    abort = threading.Thread(target=lambda: (device.connecting.wait(), group.abort()))
    abort.start()
    with pytest.raises(RuntimeError):
        group.form(formation(1, 1, offer), offer, NextGeneration("127.0.0.1").run)
    abort.join()
    group.leave()
    assert not dist.is_initialized()


def test_an_abort_reaches_members_that_wait_for_each_other(device):
    """They meet in the store before they connect: NCCL's own wait cannot be aborted. A communicator that has begun is aborted, too."""
    group, offer = Group(1, device), Offer("127.0.0.1")
    order = formation(1, 2, offer)
    forming = NextGeneration("127.0.0.1").run(
        lambda: Communicators(device).prepare(PrefixStore("a", group._open_store(order, offer)), 0, 2, TIMEOUT)
    )
    until(lambda: device.calls)
    until(lambda: group.abort() or forming.done())
    with pytest.raises(RuntimeError):
        forming.result()
    assert device.aborted == [[1]]
    assert not device.connecting.is_set()


def test_an_abort_may_take_longer_than_connecting():
    """Torch's lock delays an abort until NCCL has connected or has given up: no worker may be ended before that."""
    longest = float(NCCL_DEFAULTS["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) + 1  # torch counts whole seconds
    assert longest < min(ABORT_TIMEOUT, GPU_HANG_TIMEOUT) < Timeouts().recover


def test_a_thread_that_was_abandoned_ends_what_it_makes(device):
    """The group was dropped while its communicator connects: the thread aborts it, and nothing is handed over."""
    device.may_connect.clear()
    group, offer = Group(1, device), Offer("127.0.0.1")
    building = NextGeneration("127.0.0.1").run(lambda: group.prepare(formation(1, 1, offer), offer))
    device.connecting.wait()
    group.abandon()
    with pytest.raises((RuntimeError, ValueError)):
        building.result()
    until(lambda: device.aborted)


def test_the_last_communicators_live_until_all_ranks_have_left(device):
    """After a planned change another rank may still need this one's data; after a break no rank does."""
    over = set()
    groups = Groups("127.0.0.1", over.__contains__)
    groups.accelerator = device
    for generation in (1, 2, 3):
        groups.present = formed(device, generation)
        if generation == 3:
            over.add(3)
        groups.close()
        assert device.aborted == [[number] for number in range(1, generation)] or generation == 3
        groups.end_last()
        until(lambda count=generation: len(device.aborted) >= count)
    assert sorted(device.aborted) == [[1], [2], [3]]


@pytest.mark.parametrize("has_room", [True, False])
def test_new_communicators_connect_beside_the_abort_of_the_last_ones(device, has_room):
    """Three worlds broke in turn: the first one's abort must have ended, and without room also the later ones'.

    gloo's group is made beside all aborts.
    """
    groups, may_end = Groups("127.0.0.1", lambda _: True), {number: threading.Event() for number in (1, 2, 3, 4)}
    groups.accelerator, device.has_room = device, has_room
    device.abort = lambda communicator: may_end[communicator[0]].wait()
    for generation in (1, 2, 3):
        groups.present = formed(device, generation)
        groups.close()
    groups.open(4)
    offer = Offer("127.0.0.1")
    building = groups.next.run(lambda: groups.present.prepare(formation(4, 1, offer), offer))
    until(lambda: groups.present._listeners)
    must_end = (1, 2, 3) if not has_room else (1,)
    for number in must_end:
        assert not wait((building,), 0.1).done
        may_end[number].set()
    building.result(10)
    for event in may_end.values():
        event.set()
    groups.close()
    assert [call for call, _ in device.calls].count("create") == 4


def test_communicators_of_past_worlds_are_released(device):
    """However many worlds break: each communicator holds a store, memory and threads."""
    groups, past = Groups("127.0.0.1", lambda _: True), []
    groups.accelerator = device
    for generation in range(1, 7):
        offer = Offer("127.0.0.1")
        groups.open(generation)
        groups.next.run(partial(groups.present.prepare, formation(generation, 1, offer), offer)).result(10)
        past.append(weakref.ref(groups.present._communicators))
        groups.close()
    gc.collect()
    alive = [generation for generation, communicators in enumerate(past, 1) if communicators() is not None]
    assert alive == [4, 5, 6]


def test_an_error_that_no_call_raises_is_seen(device):
    """A collective failed on the device: the group is not intact, although all connections exist."""
    group = formed(device)
    assert (group.error, group.is_intact()) == ("", True)
    device.errors[1] = "a peer was lost"
    assert (group.error, group.is_intact()) == ("a peer was lost", False)
    group.leave()


def test_an_abort_that_does_not_end_is_reported():
    """The caller then ends the process: no operation of this device will end."""
    device, stuck = FakeAccelerator(), threading.Event()
    device.abort = lambda _: stuck.wait()
    communicators = Communicators(device)
    communicators.prepare(None, 0, 1, TIMEOUT)
    communicators.abort()
    assert not communicators.wait(0.05)
    stuck.set()
    assert communicators.wait(20.0)
