"""Which connections belong to a generation's groups: what an abort shuts down, who may connect, what counts as broken."""

import contextlib
import os
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from nbelastic.worker import process_group
from nbelastic.worker.formation import Formation
from nbelastic.worker.groups import Groups
from nbelastic.worker.next_generation import NextGeneration
from nbelastic.worker.process_group import Group, Offer
from nbelastic.worker.sockets import Connections, borrowed, end_reading, listeners, open_sockets
from tests.support.waiting import until
from tests.worker.forming import form, formation


def test_a_descriptor_that_was_given_to_another_file_is_left_alone(tmp_path):
    """A connection was closed after it was listed: a file that reuses its number stays open."""
    with (tmp_path / "file").open("w") as file:
        before = len(os.listdir("/proc/self/fd"))
        assert end_reading(file.fileno(), "socket:[1]") is None
        assert len(os.listdir("/proc/self/fd")) == before
        file.write("still open")


def addresses_that_connect(port):
    """The addresses, of a member's and a stranger's, that can connect to this port."""
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
    """Its gloo listener accepts no connection, its store and the next one's only members; a store that is taken accepts all."""
    next_generation, offer = NextGeneration("127.0.0.1"), Offer("127.0.0.1")
    before = open_sockets()  # by inode: descriptor numbers are reused
    group = Group(1)
    group.form(formation(1, 1, offer), offer, next_generation.run)
    (gloo,) = listeners(fd for name, fd in open_sockets().items() if name not in before)
    with socket.socket(fileno=os.dup(gloo)) as one:
        assert addresses_that_connect(one.getsockname()[1]) == []
    assert addresses_that_connect(offer.store.port) == ["127.0.0.1"]
    where = []
    next_generation.make_offer(group.peers, where.append)
    next_generation.run(lambda: None).result()
    port = int(where[0].rpartition(":")[2])
    assert addresses_that_connect(port) == ["127.0.0.1"]
    next_generation.expect(("127.0.0.9",))
    next_generation.run(lambda: None).result()
    assert addresses_that_connect(port) == ["127.0.0.1", "127.0.0.9"]
    assert next_generation.take_offer().endpoint == where[0]
    subgroup = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=subgroup)
    group.leave()


def test_connections_of_the_users_threads_are_never_cut(monkeypatch):
    """They are opened while a group is formed: neither an abort nor the end of the generation closes them."""
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
    assert not select.select([theirs[1], theirs[2], theirs[4], theirs[5]], [], [], 0)[0]  # none has reached its end
    for caller, accepted in (theirs[1:3], theirs[4:6]):
        caller.sendall(b"still here")
        assert accepted.recv(10) == b"still here"
    for one in theirs:
        one.close()


def test_a_port_at_another_address_is_not_the_groups():
    """NCCL's listener, or the user's, has the same port as gloo's, at another address: its connections are never ended."""
    group = form(1, 1)
    ((address, port),) = group._listeners
    assert address != "127.0.0.2"
    with socket.create_server(("127.0.0.2", port)) as server, socket.create_connection(server.getsockname()):
        accepted = server.accept()[0]
        group.abort()
        group.leave()
        with accepted, pytest.raises(BlockingIOError):  # there is no data, and no end of the data
            accepted.recv(1, socket.MSG_DONTWAIT)


def test_a_socket_keeps_its_descriptor_while_another_thread_looks_at_it():
    """Otherwise a connection listed under a copy's number would count as broken once the copy is closed."""
    with socket.socket() as ours:
        inode = os.readlink(f"/proc/self/fd/{ours.fileno()}")
        with borrowed(ours.fileno(), inode) as copy:
            assert copy.fileno() != ours.fileno()
            assert open_sockets()[inode] == ours.fileno()


def test_a_default_timeout_of_the_program_leaves_connections_as_they_are():
    """`socket.setdefaulttimeout(30)`: torch's connection to its store stays blocking when nbelastic lists or ends it."""
    before = socket.getdefaulttimeout()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as store:
        inode = os.readlink(f"/proc/self/fd/{store.fileno()}")
        try:
            socket.setdefaulttimeout(30)
            with borrowed(store.fileno(), inode) as copy:
                assert copy is not None
                assert os.get_blocking(store.fileno())
            with end_reading(store.fileno(), inode) as ended:
                assert ended is not None
                assert os.get_blocking(store.fileno())
        finally:
            socket.setdefaulttimeout(before)


@contextlib.contextmanager
def aborted_connection():
    """A connection whose one end was aborted: that rank's `Connections`, and the other end."""
    connections = Connections()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as other:
        other.settimeout(20)
        connections.listeners = frozenset({server.getsockname()})
        aborted = server.accept()[0]
        with aborted:
            aborted.setblocking(False)  # as gloo's are
            connections.end({name: fd for name, fd in connections.now().items() if fd == aborted.fileno()})
            assert aborted.recv(1) == b""
            assert not os.get_blocking(aborted.fileno())
        yield connections, other


def has_ended(other):
    with contextlib.suppress(ConnectionResetError):
        return other.recv(1) == b""
    return True


def test_a_rank_that_goes_on_writing_to_an_aborted_one_meets_no_error():
    """Gloo would not report it. The aborted rank reads the end of the data at once; the other one when all have left."""
    with aborted_connection() as (connections, other):
        for _ in range(2):  # the first write after the connection's end would succeed
            other.sendall(b"a gradient")
            assert not select.select([other], [], [], 0.05)[0]
        connections.close()
        assert has_ended(other)


def test_the_last_group_is_aborted_for_all():
    """A rank keeps the connections of a group that it has left. Between generations an abort for all ends them."""
    groups = Groups("127.0.0.1", lambda _: True)
    with aborted_connection() as (connections, other):
        groups.present = SimpleNamespace(generation=1, connections=connections, leave=lambda **_: None)
        groups.close()
        assert not select.select([other], [], [], 0.05)[0]
        groups.abort_for_all()
        assert has_ended(other)


def two_members(pool):
    """Two members, and for each its default group and a group that its program makes."""
    offer, members = Offer("127.0.0.1"), [Group(1) for _ in range(2)]
    store = dist.HashStore()

    def join(rank):
        where = Formation(1, rank, 2, rank, 2, 0, 1, offer.endpoint, 0, (), (("a", 2),))
        members[rank].prepare(where, offer if rank == 0 else None)
        default = members[rank].make_gloo(store, rank, 2)
        return default, members[rank].make_gloo(dist.PrefixStore("own", store), rank, 2)

    return members, [*pool.map(join, range(2))]


def test_an_abort_reaches_the_groups_that_the_program_makes():
    """Two members meet in a group of the program; one waits there for the other, and an abort makes it raise."""
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


def test_a_member_that_dies_as_soon_as_it_has_connected_is_missed(monkeypatch):
    """Gloo has closed that connection before this rank lists them: later errors do not come from the program."""
    complete, both_connected = Group._complete, threading.Barrier(2)

    def late(group):
        if group._default is not None:  # this is a later group of this member
            return complete(group)
        both_connected.wait(20)
        connections = group.connections
        pairs = {i: fd for i, fd in connections.now().items() if connections.count([i], group._listeners)}
        for inode, fd in pairs.items():  # the other member's thread may have ended it already
            with end_reading(fd, inode) or contextlib.nullcontext():
                pass
        until(lambda: pairs.keys().isdisjoint(group.connections.now()))
        return complete(group)

    with ThreadPoolExecutor(2) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(Group, "_complete", late)
            members, _ = two_members(pool)
        assert [member.is_intact() for member in members] == [False, False]


class RegisteredGroup:
    """A group as torch registers it."""

    _device_types = (torch.device("cpu"),)

    def __init__(self, backend):
        self._get_backend = lambda _: backend


def test_a_group_that_the_program_destroyed_is_no_broken_connection(monkeypatch):
    """Errors after its destruction are the program's. A group that is not destroyed counts, as a lost one does."""
    with ThreadPoolExecutor(2) as pool:
        members, ((first, own), (second, other)) = two_members(pool)
    with monkeypatch.context() as patch:
        patch.setitem(dist.distributed_c10d._world.pg_map, RegisteredGroup(own), ("gloo", None))
        assert members[0].is_intact()
        del other  # the other rank closes its end
        until(lambda: not members[0].is_intact())
    assert members[0].is_intact()  # torch has no such group: the program has destroyed it
    del own
    assert members[0].is_intact()
    del second
    until(lambda: not members[0].is_intact())
    del first


def test_a_group_of_the_programs_counts_until_it_is_destroyed():
    """A lost connection of a group that torch still registers breaks the world."""
    group = form(1, 1)
    own = dist.new_group([0])
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as gone:
        group._own[-1][1][os.readlink(f"/proc/self/fd/{gone.fileno()}")] = gone.fileno()
    assert not group.is_intact()
    dist.destroy_process_group(own)
    assert group.is_intact()
    group.leave()


def test_a_listener_of_another_thread_is_not_taken_for_gloos(monkeypatch):
    """If one opens at the same time, gloo's device is made again; after 20 attempts forming fails."""
    listing, theirs = process_group.listeners, []

    def beside(descriptors):
        found = listing(descriptors)
        if len(theirs) < most:
            theirs.append(socket.create_server(("127.0.0.1", 0)))
            found[theirs[-1].fileno()] = theirs[-1].getsockname()
        return found

    monkeypatch.setattr(process_group, "listeners", beside)
    most = 3
    _, _, (_, port) = process_group._new_device(open_sockets())
    assert len(theirs) == 3
    assert port not in [one.getsockname()[1] for one in theirs]
    most = 100
    with pytest.raises(RuntimeError, match="gloo's listener was not found, 20 times: unset GLOO_DEVICE_TRANSPORT"):
        process_group._new_device(open_sockets())
    for one in theirs:
        one.close()
