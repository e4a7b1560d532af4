"""A group that is prepared while another one trains: used, dropped, or abandoned."""

import os
import socket
import sys
import threading
import time

import torch.distributed as dist

from nbelastic.worker.formation import Formation
from nbelastic.worker.next_generation import NextGeneration
from nbelastic.worker.process_group import Group, Offer
from tests.support.waiting import until
from tests.worker.forming import form, formation, works


def prepare(next_generation, generation, size=1):
    """Prepare this generation as rank 0. Returns the formation and a list, to which the outcome is appended."""
    offers, outcomes = [], []
    next_generation.make_offer({"127.0.0.1"}, offers.append)
    next_generation.run(lambda: None).result()
    where = Formation(generation, 0, size, 0, size, 0, 1, offers[0], 0, (), (("a", size),))
    next_generation.prepare(where, None, outcomes.append)
    return where, outcomes


def test_a_group_is_prepared_beside_another_and_takes_its_place():
    """Forty times: the old group works until it is left, the new one at once, and no descriptors leak."""
    next_generation, hook = NextGeneration("127.0.0.1"), sys.excepthook
    group, files = form(1, 1), []
    for generation in range(2, 42):
        where, outcomes = prepare(next_generation, generation)
        next_generation.run(lambda: None).result()
        assert outcomes == [None]
        assert works()
        offer = next_generation.take_offer()
        group.leave()
        group = next_generation.take(generation)
        group.form(where, offer, next_generation.run)
        assert works()
        assert group.is_intact()
        assert dist.get_backend() == "gloo"
        for thread in threading.enumerate():
            if thread.name == "nbelastic-drop":
                thread.join()
        files.append(len(os.listdir("/proc/self/fd")))
    group.leave()
    assert max(files[10:]) <= max(files[:10]) + 2
    assert sys.excepthook is hook


def test_a_peer_that_died_since_it_was_prepared_is_not_forgotten():
    """Gloo has closed the connection already: later errors in this group come from the lost peer, not the program."""
    next_generation = NextGeneration("127.0.0.1")
    where, _ = prepare(next_generation, 1)
    next_generation.run(lambda: None).result()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as gone:
        next_generation.group._default[os.readlink(f"/proc/self/fd/{gone.fileno()}")] = gone.fileno()
    group = next_generation.take(1)
    group.form(where, next_generation.take_offer(), next_generation.run)
    assert not group.is_intact()
    group.leave()


def test_what_was_prepared_for_nothing_is_dropped():
    """It was built, or waits for a peer that never connects: the group that trains is not affected, and the next is built."""
    next_generation, group = NextGeneration("127.0.0.1"), form(1, 1)
    for generation in (2, 3, 4):
        _, outcomes = prepare(next_generation, generation)
        next_generation.run(lambda: None).result()
        assert next_generation.abort()
        assert next_generation.group is None
        assert (outcomes, works(), group.is_intact()) == ([None], True, True)
        _, outcomes = prepare(next_generation, generation + 10, size=2)
        assert not next_generation.group.is_settled
        while not next_generation.abort():
            time.sleep(0.02)
        next_generation.run(lambda: None).result()
        until(lambda: outcomes)  # on a busy machine it is abandoned, and its thread reports that later
        assert len(outcomes) == 1
        assert isinstance(outcomes[0], Exception)
        assert (works(), group.is_intact()) == (True, True)
    group.leave()


def test_a_preparation_that_hangs_is_left_behind():
    """The next one runs in a new thread."""
    next_generation = NextGeneration("127.0.0.1")
    held = threading.Event()
    next_generation.group = Group(1)
    next_generation.group.is_settled = False
    next_generation.run(held.wait)
    offer = next_generation.take_offer()
    assert offer.endpoint.startswith("127.0.0.1:")
    held.set()


def test_a_preparation_that_cannot_be_woken_spoils_nothing_that_follows(monkeypatch):
    """A peer was stopped before it connected. Later generations are formed while the thread still waits for it."""
    held, hanging = threading.Event(), threading.Semaphore(0)

    def gloo(*_):
        """Wait for a peer to connect."""
        hanging.release()
        held.wait()

    with monkeypatch.context() as patch:
        patch.setattr(Group, "_make_first", gloo)
        next_generation = NextGeneration("127.0.0.1")
        prepare(next_generation, 1, size=2)
        hanging.acquire()
        abandoned = next_generation.group
        began = time.monotonic()
        while not next_generation.abort():
            time.sleep(0.02)
        assert 0.1 < time.monotonic() - began < 20
        prepare(next_generation, 2, size=2)
        hanging.acquire()
    offer = Offer("127.0.0.1")
    assert next_generation.take(3) is None
    group = Group(3)
    group.form(formation(3, 1, offer), offer, next_generation.run)
    abandoned.abort()
    assert next_generation.abort()
    assert works()
    assert group.is_intact()
    group.leave()
    held.set()


def test_a_store_that_no_longer_exists_is_an_error():
    """Rank 0 has used its store meanwhile."""
    next_generation = NextGeneration("127.0.0.1")
    outcomes = []
    where = Formation(2, 0, 1, 0, 1, 0, 1, "127.0.0.1:1", 0, (), (("a", 1),))
    next_generation.prepare(where, None, outcomes.append)
    next_generation.run(lambda: None).result()
    assert "does not exist any more" in str(outcomes[0])
