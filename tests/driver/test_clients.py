"""The driver's socket: who may connect, which updates a client receives, and how a client leaves."""

from __future__ import annotations

import os
import signal
import stat
import time

import pytest

import nbelastic as nbe
from nbelastic.client.connection import Connection
from nbelastic.core import commands as cmd
from nbelastic.driver import client_lease, clients
from nbelastic.protocol import client_messages as u
from nbelastic.protocol import events as ev
from nbelastic.protocol import messages
from nbelastic.protocol import requests as r
from nbelastic.protocol.run_folder import RunFolder
from tests.core.story import wid
from tests.driver.hostless_cluster import NoHosts
from tests.driver.raw_client import RawClient, driver_of, in_driver
from tests.support import driver_thread
from tests.support.processes import run_folder
from tests.support.waiting import until


def test_only_the_user_may_connect(start_hostless):
    """Only the user may open the socket and its folder."""
    path = run_folder(start_hostless())
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / u.SOCKET).stat().st_mode) == 0o600


def test_the_path_of_the_socket_may_be_long(start_hostless, monkeypatch, tmp_path):
    """A cluster works if the path of its socket exceeds the 107 characters that a socket address holds."""
    base = tmp_path / ("x" * 100)
    base.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(base))
    cluster = start_hostless("y" * 100)
    cluster.scale(2, 3)
    assert cluster.status().min == 2


@pytest.mark.parametrize("data", [b"\xff" * 8, u.LENGTH.pack(3) + b"abc", u.LENGTH.pack(0), b"GET / HTTP/1.1\r\n\r\n"])
def test_invalid_bytes_end_only_their_connection(start_hostless, data):
    """Invalid bytes end the connection that sent them, and have no other effect."""
    cluster = start_hostless()
    with RawClient(cluster) as raw:
        raw.socket.sendall(data)
        if not data.startswith(b"GET"):
            assert raw.receive() is None
    cluster.scale(2, 3)
    assert cluster.status().min == 2


def test_a_client_of_another_version_is_refused(start_hostless, monkeypatch):
    """A client with other messages is refused with advice; a request before the greeting gets no answer."""
    cluster = start_hostless()
    with monkeypatch.context() as other:
        other.setattr(u, "fingerprint", iter(["other", "ours"]).__next__)  # the client's, then the driver's
        with pytest.raises(nbe.UsageError, match="their messages differ: use nbelastic"):
            Connection(run_folder(cluster))
    with RawClient(cluster) as raw:
        raw.send(u.Ask(1, u.encoded(r.Stop("nobody"))))
        raw.send(u.ClientHello("1", u.fingerprint()))
        assert isinstance(raw.receive(), u.DriverHello)
        assert isinstance(raw.receive(), u.Update)
    assert cluster.status().phase == "waiting"


def test_an_update_holds_only_changes(start_hostless):
    """The first update holds everything; later ones hold only changes, with the newest unfinished lines."""
    cluster = start_hostless()
    job = cluster.run(os.getpid)

    def output_of(text, end):
        return lambda driver: driver._on_message(
            "worker/a/0#1", messages.WorkerOutput(wid("a/0#1"), "out", text, end, job.name, 0)
        )

    in_driver(cluster, lambda driver: setattr(driver, "_is_known", lambda _: True))
    in_driver(cluster, output_of("one\ntwo\nthr", 11))
    with RawClient(cluster) as raw:
        raw.send(u.ClientHello("1", u.fingerprint()))
        raw.receive()
        first = raw.receive()
        assert first.event_count == len(first.events) == len(cluster.events)
        (update,) = first.jobs
        assert [line.text for _, line in update.lines] == ["one", "two"]
        assert [line.text for _, line in update.unfinished] == ["thr"]
        in_driver(cluster, output_of("ee\n", 14))
        while not (second := raw.receive()).jobs:  # an update that was due when the client came has no changes
            assert (second.events, second.setup_cells) == ([], None)
        assert (second.events, second.setup_cells) == ([], None)
        (update,) = second.jobs
        assert [line.text for _, line in update.lines] == ["three"]
        assert abs(update.lines[0][1].time - time.time()) < 10, "when the driver has received it"
        assert [line.text for _, line in update.unfinished] == [""]
    until(lambda: job.logs() == "a/0#1 | one\na/0#1 | two\na/0#1 | three")


def test_the_effect_of_a_request_is_visible_when_it_returns(start_hostless):
    """After a request returns, the status and the events show its effect: 100 times."""
    cluster = start_hostless()
    for most in range(1, 101):
        cluster.scale(1, most)
        assert cluster.status().max == most
        assert f"max {most}" in cluster.events[-1].text


def test_a_client_that_does_not_read_fills_no_memory(start_hostless):
    """The driver buffers little for a client that stops reading, and sends it all kept events when it reads again."""
    cluster = start_hostless()
    with RawClient(cluster) as raw:
        raw.send(u.ClientHello("1", u.fingerprint()))
        for number in range(60):
            in_driver(
                cluster,
                lambda driver, number=number: [
                    driver.record(cmd.Record("noted", f"{number}-{each} " + "x" * 1000)) for each in range(100)
                ],
            )
            in_driver(cluster, lambda driver: driver._clients._send_updates())
        behind = lambda: [client for client in driver_of(cluster)._clients._greeted if client._is_writing_paused]
        (other,) = until(lambda: len(found := behind()) == 1 and found, what="the reading client to catch up")
        assert other._transport.get_write_buffer_size() < 4 * clients.MAX_UNREAD
        until(lambda: len(cluster.events) >= 6000)
        received = []
        while len(received) < len(cluster.events):
            message = raw.receive()
            received += message.events if isinstance(message, u.Update) else []
        assert received == cluster.events


def test_output_of_a_cell_that_a_client_does_not_read_is_left_out(start_hostless):
    """The driver buffers little of it. The client gets a line in its place, also before the answer."""
    cluster = start_hostless()
    with RawClient(cluster) as raw:
        raw.send(u.ClientHello("1", u.fingerprint()))
        raw.send(u.Ask(5, u.encoded(r.WaitForWorld(3))))
        connections = driver_of(cluster)._clients._greeted
        (own,) = until(lambda: [one for one in [*connections] if one._pending], what="the request")
        piece = r.Piece("a/0#1", "out", "x" * 50_000)
        in_driver(cluster, lambda _: [own._send_piece(5, piece) for _ in range(200)])
        assert own._transport.get_write_buffer_size() < 2 * clients.MAX_UNREAD
        received = []
        while clients.MISSED not in received:
            message = raw.receive()
            received += [message.piece.text] if isinstance(message, u.Part) else []
        assert 1 < len(received) < 200
        in_driver(cluster, lambda _: own._send_piece(5, piece))
        while not (isinstance(message := raw.receive(), u.Part) and message.piece == piece):
            pass


def test_a_request_that_timed_out_is_forgotten(start_hostless):
    """The driver forgets a request whose client stopped waiting."""
    cluster = start_hostless()
    waiting = lambda: in_driver(cluster, lambda driver: len(driver._pending))
    before = waiting()
    with pytest.raises(nbe.WaitTimeoutError):
        cluster.wait(3, timeout=0.1)
    cluster.scale(1, 2)  # the driver has received the earlier messages by then
    in_driver(cluster, lambda driver: driver._pending.check_and_publish())
    assert waiting() == before


def test_requests_of_a_client_that_disconnects_are_forgotten(start_hostless):
    """The driver forgets the requests of a client that disconnects."""
    cluster = start_hostless()
    with RawClient(cluster) as raw:
        raw.send(u.ClientHello("1", u.fingerprint()))
        for number in (1, 2):
            raw.send(u.Ask(number, u.encoded(r.WaitForWorld(3))))
        until(lambda: in_driver(cluster, lambda driver: len(driver._pending)) == 2)
    until(
        lambda: in_driver(cluster, lambda driver: (driver._pending.check_and_publish(), len(driver._pending))[1]) == 0
    )
    assert in_driver(cluster, lambda driver: len(driver._clients._greeted)) == 1
    assert "driver-error" not in [event.kind for event in cluster.events]


def test_only_the_owner_cannot_leave_a_cluster_that_is_not_kept(start_hostless):
    """An attached client may leave a cluster that is not kept; the kernel that owns it may not."""
    cluster = start_hostless()
    other = nbe.Cluster.attach("quiet", discovery=NoHosts())
    other.close()
    assert other._link.connection is None
    with pytest.raises(nbe.UsageError, match="is not kept: start it with keep=True"):
        cluster.detach()
    assert cluster.status().phase == "waiting"


class Clock:
    """A clock that a test can put forward, in the place of the driver's."""

    def __init__(self):
        self.ahead, self.reads = 0.0, 0

    def now(self):
        self.reads += 1
        return time.monotonic() + self.ahead


def test_a_kept_cluster_ends_with_its_lease(start_hostless, monkeypatch):
    """A kept cluster stops after its lease without a client; a client that attaches in time renews the lease."""
    clock = Clock()
    monkeypatch.setattr(client_lease, "CHECK_INTERVAL", 0.01)

    def let_pass(seconds):
        """Let time pass after the last client has left, and wait until the driver has checked the lease."""
        until(lambda: not driver._clients.has_any)
        clock.ahead += seconds
        before = clock.reads
        until(lambda: clock.reads > before + 1 or driver.cluster.stopping)

    cluster = start_hostless(keep=True, lease=60.0)
    driver, folder = driver_of(cluster), RunFolder(cluster.name)
    driver._clients._now = clock.now
    cluster.detach()
    let_pass(50.0)
    nbe.Cluster.attach("quiet", discovery=NoHosts()).detach()
    let_pass(50.0)
    assert not driver.cluster.stopping
    let_pass(20.0)
    until(lambda: not folder.path.exists())
    assert driver.cluster.stopping == "no client has been connected for 60 s"


def test_a_faulty_driver_without_clients_ends_with_the_lease(start_hostless, monkeypatch):
    """A driver that makes no more decisions still ends with the lease."""
    cluster = start_hostless(keep=True, lease=1.0, silence=1.0)
    folder = RunFolder(cluster.name)
    in_driver(cluster, lambda driver: driver.stop_deciding(ev.Ticked(), KeyError("x")))
    cluster.detach()
    until(lambda: not folder.path.exists())


def test_a_kernel_sees_why_its_driver_stopped_at_once(start_hostless, monkeypatch, tmp_path):
    """A kernel sees why its driver stopped before the kernel was connected."""

    def connect_late(*arguments):
        thread = driver_thread.driver_threads["quiet"]
        thread.ask(ev.StopRequested("the inventory is down"))
        until(lambda: thread.driver.cluster.phase == "finished")
        return Connection(*arguments)

    monkeypatch.setattr(driver_thread, "Connection", connect_late)
    cluster = nbe.Cluster(name="quiet", discovery=NoHosts(), log_dir=tmp_path / "logs").start(wait=False)
    until(lambda: cluster.status().phase == "finished")
    assert cluster.status().reason == "stopped: the inventory is down"


def test_an_attach_that_fails_leaves_no_connection(start_hostless):
    """An attach with a missing discovery closes its connection: an open one would renew the lease."""
    cluster = start_hostless()
    with pytest.raises(nbe.UsageError, match="no-such-script"):
        nbe.Cluster.attach("quiet", discovery="./no-such-script")
    until(lambda: in_driver(cluster, lambda driver: len(driver._clients._open)) == 1)


def test_a_cluster_whose_lock_is_removed_ends(start_hostless, monkeypatch):
    """A cluster stops when its lock file was removed, because no client can find it any more."""
    monkeypatch.setattr(client_lease, "CHECK_INTERVAL", 0.05)
    cluster = start_hostless()
    RunFolder(cluster.name).lock.unlink()
    until(lambda: cluster.status().reason == "stopped: its lock file was removed")


def test_a_status_that_is_decoded_late_does_not_replace_a_newer_one(start_hostless):
    """A status that another thread decoded late does not replace a newer one."""
    cluster = start_hostless()
    driver = cluster._link.connection
    old = driver._status
    cluster.scale(2, 3)
    driver._decoded = old, cluster.status()
    assert cluster.status().min == 2


def test_a_request_before_a_detach_reaches_the_driver(start_hostless):
    """A request that is followed at once by a detach reaches the driver: 20 times."""
    cluster = start_hostless(keep=True)
    for most in range(1, 21):
        other = nbe.Cluster.attach("quiet")
        other.order({"order": "scale", "max": most}, "a page")
        other.detach()
        until(lambda most=most: cluster.status().max == most)


def test_an_interrupted_attach_leaves_no_connection(start_hostless, monkeypatch):
    """Ctrl-C while an attach awaits the greeting closes its connection: an open one would renew the lease."""
    cluster = start_hostless()
    monkeypatch.setattr(Connection, "_await_greeting", lambda _: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            nbe.Cluster.attach("quiet")
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: in_driver(cluster, lambda driver: len(driver._clients._open)) == 1)
