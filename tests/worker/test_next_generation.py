"""A group that is prepared while another one trains: used, dropped, or abandoned."""

import os
import socket
import sys
import threading
import time

import torch
import torch.distributed as dist

from nbelastic.worker.formation import Formation
from nbelastic.worker.next_generation import NextGeneration
from nbelastic.worker.process_group import Group, Offer, UnsupportedError
from tests.support.waiting import until
from tests.worker.forming import form, formation, works


def prepare(ahead, generation, size=1):
    """What `NextGeneration` says of an attempt to prepare this generation, as rank 0."""
    offers, said = [], []
    ahead.make_offer({"127.0.0.1"}, offers.append)
    ahead.run(lambda: None).result()
    where = Formation(generation, 0, size, 0, size, 0, 1, offers[0], 0, (), (("a", size),))
    ahead.prepare(where, torch.device("cpu"), "gloo", said.append)
    return where, said


def test_a_group_is_prepared_beside_another_and_takes_its_place():
    """Forty times: the old one works until it is left, the new one does at once, and nothing piles up."""
    ahead, hook = NextGeneration("127.0.0.1"), sys.excepthook
    group, files = form(1, 1), []
    for generation in range(2, 42):
        where, said = prepare(ahead, generation)
        ahead.run(lambda: None).result()
        assert said == [None]
        assert works()
        offer = ahead.take_offer()
        group.leave()
        group = ahead.take(generation)
        group.form(where, offer, ahead.run)
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
    """Gloo has closed the connection already: what fails next in this group is for the peer's sake, not the program's."""
    ahead = NextGeneration("127.0.0.1")
    where, _ = prepare(ahead, 1)
    ahead.run(lambda: None).result()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as gone:
        ahead.group._default[os.readlink(f"/proc/self/fd/{gone.fileno()}")] = gone.fileno()
    group = ahead.take(1)
    group.form(where, ahead.take_offer(), ahead.run)
    assert not group.is_intact()
    group.leave()


def test_what_was_prepared_for_nothing_is_dropped():
    """It had been built, or waits for a peer that never comes: the group that trains is not touched, and the next is built."""
    ahead, group = NextGeneration("127.0.0.1"), form(1, 1)
    for generation in (2, 3, 4):
        _, said = prepare(ahead, generation)
        ahead.run(lambda: None).result()
        assert ahead.abort()
        assert ahead.group is None
        assert (said, works(), group.is_intact()) == ([None], True, True)
        _, said = prepare(ahead, generation + 10, size=2)
        assert not ahead.group.is_settled
        while not ahead.abort():
            time.sleep(0.02)
        ahead.run(lambda: None).result()
        until(lambda: said)  # on a busy machine it is given up, and its thread says so later
        assert len(said) == 1
        assert isinstance(said[0], Exception)
        assert (works(), group.is_intact()) == (True, True)
    group.leave()


def test_a_preparation_that_hangs_is_left_behind():
    """The next one gets a thread of its own."""
    ahead = NextGeneration("127.0.0.1")
    held = threading.Event()
    ahead.group = Group(1, torch.device("cpu"), "gloo")
    ahead.group.is_settled = False
    ahead.run(held.wait)
    offer = ahead.take_offer()
    assert offer.endpoint.startswith("127.0.0.1:")
    held.set()


def test_a_preparation_that_cannot_be_woken_spoils_nothing_that_follows(monkeypatch):
    """A peer was stopped before it connected. The generations after it are formed beside the thread that waits for it."""
    held, hanging = threading.Event(), threading.Semaphore(0)

    def gloo(*_):
        """It waits for a peer to connect."""
        hanging.release()
        held.wait()

    with monkeypatch.context() as patch:
        patch.setattr(Group, "_make_first", gloo)
        ahead = NextGeneration("127.0.0.1")
        prepare(ahead, 1, size=2)
        hanging.acquire()
        given_up = ahead.group
        began = time.monotonic()
        while not ahead.abort():
            time.sleep(0.02)
        assert 0.1 < time.monotonic() - began < 20
        prepare(ahead, 2, size=2)
        hanging.acquire()
    offer = Offer("127.0.0.1")
    assert ahead.take(3) is None
    group = Group(3, torch.device("cpu"), "gloo")
    group.form(formation(3, 1, offer), offer, ahead.run)
    given_up.abort()
    assert ahead.abort()
    assert works()
    assert group.is_intact()
    group.leave()
    held.set()


def test_a_store_that_is_gone_is_said():
    """Rank 0 has used its store meanwhile; that NCCL can prepare no group at all is told apart from that."""
    ahead = NextGeneration("127.0.0.1")
    said = []
    where = Formation(2, 0, 1, 0, 1, 0, 1, "127.0.0.1:1", 0, (), (("a", 1),))
    ahead.prepare(where, torch.device("cpu"), "gloo", said.append)
    ahead.run(lambda: None).result()
    ahead.prepare(where, torch.device("cpu"), "cpu:gloo,cuda:nccl", said.append)
    ahead.run(lambda: None).result()
    assert "does not exist any more" in str(said[0])
    assert [isinstance(failure, UnsupportedError) for failure in said] == [False, True]
    assert "not prepared beside the training" in str(said[1])
