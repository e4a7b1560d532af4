"""Forming, aborting and leaving a generation's group, without any driver."""

import contextlib
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from nbelastic.worker import process_group as rendezvous
from nbelastic.worker.formation import Formation
from nbelastic.worker.next_generation import NextGeneration
from nbelastic.worker.process_group import TIMEOUT, Group, Offer, UnsupportedError
from nbelastic.worker.sockets import borrowed, listeners, open_sockets, shut_down
from tests.support.waiting import until


def formation(generation, size, offer):
    return Formation(generation, 0, size, 0, size, 0, 1, offer.endpoint, 0, (), (("a", size),))


def form(generation, size, *, abort_after=None):
    """Form generation `generation` as rank 0 of `size`; the group."""
    group, offer, over = Group(generation, torch.device("cpu"), "gloo"), Offer("127.0.0.1"), threading.Event()

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
        if group._connections is not None and not dist.is_initialized():
            group.leave()
    return group


def test_a_forming_that_waits_for_others_can_be_aborted():
    """The others never come: an abort from another thread makes it raise at once."""
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        form(1, 2, abort_after=0.2)
    assert time.monotonic() - began < 20  # the group's own timeout is half an hour
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
        shut_down(file.fileno(), "socket:[1]")
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
        group.form(formation(1, 2, offer), offer, NextGeneration("127.0.0.1").run, enough)
    assert time.monotonic() - began < 20
    group.leave()
    after = form(2, 1)
    dist.all_reduce(torch.ones(1))
    after.leave()


def works():
    one = torch.ones(3)
    dist.all_reduce(one)
    return one.tolist() == [1.0] * 3


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


def who_comes_in(port):
    """Of these two addresses: where the members are, and a stranger's."""
    found = []
    for source in ("127.0.0.1", "127.0.0.9"):
        with socket.socket() as caller:
            caller.settimeout(0.3)
            caller.bind((source, 0))
            with contextlib.suppress(TimeoutError):
                caller.connect(("127.0.0.1", port))
                found.append(source)
    return found


def test_strangers_stay_outside_once_a_group_is_formed():
    """Its gloo listener takes nobody any more, its store and the next one's only members; and what is taken is open."""
    ahead, offer = NextGeneration("127.0.0.1"), Offer("127.0.0.1")
    before = open_sockets()  # by inode: a descriptor's number may be another's soon
    group = Group(1, torch.device("cpu"), "gloo")
    group.form(formation(1, 1, offer), offer, ahead.run)
    (gloo,) = listeners(fd for name, fd in open_sockets().items() if name not in before)
    with socket.socket(fileno=os.dup(gloo)) as one:
        assert who_comes_in(one.getsockname()[1]) == []
    assert who_comes_in(offer.store.port) == ["127.0.0.1"]
    where = []
    ahead.make_offer(group.peers, where.append)
    ahead.run(lambda: None).result()
    port = int(where[0].rpartition(":")[2])
    assert who_comes_in(port) == ["127.0.0.1"]
    ahead.expect(("127.0.0.9",))
    ahead.run(lambda: None).result()
    assert who_comes_in(port) == ["127.0.0.1", "127.0.0.9"]
    assert ahead.take_offer().endpoint == where[0]
    subgroup = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=subgroup)
    group.leave()


def test_what_torch_makes_of_a_spoiled_store_is_a_failed_forming(monkeypatch):
    """A stranger who changes its keys causes errors of any kind. They are not the program's."""

    def spoiled(*_):
        raise ValueError("basic_string::_M_create")

    monkeypatch.setattr(Group, "_init", spoiled)
    with pytest.raises(RuntimeError, match="could not be formed: ValueError: basic_string"):
        form(1, 1)


def test_a_forming_that_was_left_behind_does_not_become_the_default_group(monkeypatch):
    """Its peer connects after all, when the next generation's group trains already: that one stays as it is."""

    class EnoughError(Exception):
        pass

    def enough():
        if hanging.acquire(blocking=False):
            raise EnoughError

    held, hanging, made = threading.Event(), threading.Semaphore(0), threading.Event()
    make = Group._make_first

    def late(group, store, rank, size, timeout=TIMEOUT):
        """The other rank is there at last: here the group has one member after all."""
        hanging.release()
        held.wait()
        made.set()
        return make(group, store, rank, 1, timeout)

    ahead, offer = NextGeneration("127.0.0.1"), Offer("127.0.0.1")
    others = threading.enumerate()
    with monkeypatch.context() as patch:
        patch.setattr(Group, "_make_first", late)
        group = Group(1, torch.device("cpu"), "gloo")
        with pytest.raises(EnoughError):
            group.form(formation(1, 2, offer), offer, ahead.run, enough)
        (abandoned,) = {thread for thread in threading.enumerate() if "nbelastic-prepare" in thread.name} - {*others}
        ahead.abandon_thread()
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


def test_connections_of_the_users_threads_are_never_cut(monkeypatch):
    """They are opened while a group is formed, in the middle of it: an abort and the end of the generation pass them by."""
    make, theirs = Group._make, []

    def beside(*args):
        server = socket.create_server(("127.0.0.1", 0))
        caller = socket.create_connection(server.getsockname())
        theirs.extend([server, caller, server.accept()[0]])
        return make(*args)

    monkeypatch.setattr(Group, "_make", beside)
    group = form(1, 1)
    mine = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=mine)
    group.abort()
    group.leave()
    assert len(theirs) == 6
    for caller, accepted in (theirs[1:3], theirs[4:6]):
        caller.sendall(b"still here")
        assert accepted.recv(10) == b"still here"
    for one in theirs:
        one.close()


def test_a_socket_keeps_its_descriptor_while_another_thread_looks_at_it():
    """Else a connection that was noted under the number of a copy would count as broken once the copy is closed."""
    with socket.socket() as ours:
        inode = os.readlink(f"/proc/self/fd/{ours.fileno()}")
        with borrowed(ours.fileno(), inode) as copy:
            assert copy.fileno() != ours.fileno()
            assert open_sockets()[inode] == ours.fileno()


def two_members(pool):
    """They, and of each its default group and one that its program makes."""
    offer, members = Offer("127.0.0.1"), [Group(1, torch.device("cpu"), "gloo") for _ in range(2)]
    store = dist.HashStore()

    def join(rank):
        where = Formation(1, rank, 2, rank, 2, 0, 1, offer.endpoint, 0, (), (("a", 2),))
        members[rank].prepare(where, offer if rank == 0 else None)
        default = members[rank].make_gloo(store, rank, 2)
        return default, members[rank].make_gloo(dist.PrefixStore("own", store), rank, 2)

    return members, [*pool.map(join, range(2))]


def test_an_abort_reaches_the_groups_that_the_program_makes():
    """Two members meet in a group of their own; one waits there for the other, and an abort makes it raise."""
    with ThreadPoolExecutor(2) as pool:
        members, both = two_members(pool)
        together = [pool.submit(own.allreduce([torch.ones(1)]).wait) for _, own in both]
        assert [one.result(20) for one in together] == [True, True]
        assert [member.is_intact() for member in members] == [True, True]
        alone = pool.submit(both[1][1].allreduce([torch.ones(1)]).wait)
        while not alone.done():
            members[1].abort()
        with pytest.raises(RuntimeError):
            alone.result()
    assert not members[0].is_intact()


class Known:
    """A group as torch knows it."""

    _device_types = (torch.device("cpu"),)

    def __init__(self, backend):
        self._get_backend = lambda _: backend


def test_a_group_that_the_program_destroyed_is_no_broken_connection(monkeypatch):
    """An error that comes after it is the program's own. One that is still there counts, as one that was lost does."""
    with ThreadPoolExecutor(2) as pool:
        members, ((first, own), (second, other)) = two_members(pool)
    with monkeypatch.context() as patch:
        patch.setitem(dist.distributed_c10d._world.pg_map, Known(own), ("gloo", None))
        assert members[0].is_intact()
        del other  # the other rank closes its end
        until(lambda: not members[0].is_intact())
    assert members[0].is_intact()  # torch knows it no more: the program has destroyed it
    del own
    assert members[0].is_intact()
    del second
    until(lambda: not members[0].is_intact())
    del first


def test_a_group_of_the_programs_counts_until_it_is_destroyed():
    """As torch keeps the books: a lost connection of a group that is still there breaks the world."""
    group = form(1, 1)
    own = dist.new_group([0])
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as gone:
        group._own[-1][1][os.readlink(f"/proc/self/fd/{gone.fileno()}")] = gone.fileno()
    assert not group.is_intact()
    dist.destroy_process_group(own)
    assert group.is_intact()
    group.leave()


def test_a_listener_of_another_thread_is_not_taken_for_gloos(monkeypatch):
    """One is opened in the same moment: gloo's device is made again. Always: the forming fails in words."""
    listing, theirs = rendezvous.listeners, []

    def beside(descriptors):
        found = listing(descriptors)
        if len(theirs) < most:
            theirs.append(socket.create_server(("127.0.0.1", 0)))
            found[theirs[-1].fileno()] = theirs[-1].getsockname()
        return found

    monkeypatch.setattr(rendezvous, "listeners", beside)
    most = 3
    _, _, (_, port) = rendezvous._new_device()
    assert len(theirs) == 3
    assert port not in [one.getsockname()[1] for one in theirs]
    most = 100
    with pytest.raises(RuntimeError, match="gloo's listener was not found, 20 times: unset GLOO_DEVICE_TRANSPORT"):
        rendezvous._new_device()
    for one in theirs:
        one.close()


def test_options_that_a_newer_torch_gives_are_taken():
    """torch 2.15 makes gloo groups with `enable_reconfigure`: the group is made, as with older ones."""
    made = []

    class FakeGroup:
        def make_gloo(self, *given):
            made.append(given)
            return "a group"

    assert rendezvous._GlooFactory(FakeGroup())("store", 1, 2, timeout=TIMEOUT, enable_reconfigure=False) == "a group"
    assert made == [("store", 1, 2, TIMEOUT)]
