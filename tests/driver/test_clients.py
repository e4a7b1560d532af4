"""The driver's socket: who may connect, which updates a client gets, and how a client leaves."""

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
from tests.core.story import wid
from tests.driver.hostless_cluster import NoHosts
from tests.driver.raw_client import RawClient, driver_of, in_driver
from tests.support import driver_thread
from tests.support.waiting import until


def test_who_may_connect(start_hostless):
    """The socket is its owner's alone, in a folder that is."""
    path = start_hostless()._link.run_folder.path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / u.SOCKET).stat().st_mode) == 0o600


def test_a_long_path_is_no_obstacle(start_hostless, monkeypatch, tmp_path):
    """A socket's path may have 107 characters, and a temporary folder's may be longer."""
    base = tmp_path / ("x" * 100)
    base.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(base))
    cluster = start_hostless("y" * 100)
    cluster.scale(2, 3)
    assert cluster.status().min == 2


@pytest.mark.parametrize("said", [b"\xff" * 8, u.LENGTH.pack(3) + b"abc", u.LENGTH.pack(0), b"GET / HTTP/1.1\r\n\r\n"])
def test_nonsense_costs_its_own_connection(start_hostless, said):
    """And nobody else anything."""
    cluster = start_hostless()
    with RawClient(cluster) as raw:
        raw.socket.sendall(said)
        if not said.startswith(b"GET"):
            assert raw.receive() is None
    cluster.scale(2, 3)
    assert cluster.status().min == 2


def test_a_client_of_another_version_is_refused(start_hostless, monkeypatch):
    """In one line that says what to do; and one that has not said hello is not answered."""
    cluster = start_hostless()
    with monkeypatch.context() as other:
        other.setattr(u, "fingerprint", iter(["other", "ours"]).__next__)  # the client's, then the driver's
        with pytest.raises(nbe.UsageError, match="their messages differ: use nbelastic"):
            Connection(cluster._link.run_folder.path)
    with RawClient(cluster) as raw:
        raw.send(u.Ask(1, u.encoded(r.Stop("nobody"))))
        raw.send(u.ClientHello("1", u.fingerprint()))
        assert isinstance(raw.receive(), u.DriverHello)
        assert isinstance(raw.receive(), u.Update)
    assert cluster.status().phase == "waiting"


def test_an_update_has_what_is_new(start_hostless):
    """The first has all there is; later ones only what has changed, the last lines without an end too."""
    cluster = start_hostless()
    job = cluster.run(os.getpid)

    def prints(text, end):
        return lambda driver: driver._on_message(
            "worker/a/0#1", messages.WorkerOutput(wid("a/0#1"), "out", text, end, job.name, 0)
        )

    in_driver(cluster, lambda driver: setattr(driver, "_is_known", lambda _: True))
    in_driver(cluster, prints("one\ntwo\nthr", 11))
    with RawClient(cluster) as raw:
        raw.send(u.ClientHello("1", u.fingerprint()))
        raw.receive()
        first = raw.receive()
        assert first.event_count == len(first.events) == len(cluster.events)
        (update,) = first.jobs
        assert [line.text for _, line in update.lines] == ["one", "two"]
        assert [line.text for _, line in update.unfinished] == ["thr"]
        in_driver(cluster, prints("ee\n", 14))
        second = raw.receive()
        assert (second.events, second.setup_cells) == ([], None)
        (update,) = second.jobs
        assert [line.text for _, line in update.lines] == ["three"]
        assert [line.text for _, line in update.unfinished] == [""]
    until(lambda: job.logs() == "a/0#1 | one\na/0#1 | two\na/0#1 | three")


def test_the_consequence_is_known_before_the_answer(start_hostless):
    """Whoever has given an order sees what has become of it as soon as that returns: 100 times."""
    cluster = start_hostless()
    for most in range(1, 101):
        cluster.scale(1, most)
        assert cluster.status().max == most
        assert f"max {most}" in cluster.events[-1].text


def test_who_does_not_read_costs_nothing(start_hostless):
    """A stopped kernel: the driver keeps nothing for it, and tells it all that it still has when it reads again."""
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
        (other,) = [client for client in driver_of(cluster)._clients._greeted if client._is_writing_paused]
        assert other._transport.get_write_buffer_size() < 4 * clients.MAX_UNREAD
        until(lambda: len(cluster.events) >= 6000)
        heard = []
        while len(heard) < len(cluster.events):
            message = raw.receive()
            heard += message.events if isinstance(message, u.Update) else []
        assert heard == cluster.events


def test_who_cancels_is_not_answered(start_hostless):
    """Nobody waits any more: the driver forgets the question."""
    cluster = start_hostless()
    waiting = lambda: in_driver(cluster, lambda driver: len(driver._pending))
    before = waiting()
    with pytest.raises(nbe.WaitTimeoutError):
        cluster.wait(3, timeout=0.1)
    cluster.scale(1, 2)  # what was said before has been heard by then
    in_driver(cluster, lambda driver: driver._pending.check_and_publish())
    assert waiting() == before


def test_who_goes_away_takes_its_questions_along(start_hostless):
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


def test_who_leaves_a_cluster_that_is_not_kept(start_hostless):
    """One that has attached to it leaves it as it is; its own kernel cannot."""
    cluster = start_hostless()
    other = nbe.Cluster.attach("quiet", discovery=NoHosts())
    other.close()
    assert other._link.connection is None
    with pytest.raises(nbe.UsageError, match="is not kept: start it with keep=True"):
        cluster.detach()
    assert cluster.status().phase == "waiting"


def test_a_kept_cluster_ends_with_its_lease(start_hostless):
    """Nobody is connected to it for so long: it stops. Somebody who comes in time begins the lease anew."""
    cluster = start_hostless(keep=True, lease=1.5, silence=1.0)
    run_folder = cluster._link.run_folder
    cluster.detach()
    time.sleep(1.0)
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as other:
        time.sleep(1.0)
        assert other.status().phase == "waiting"
        other.detach()
    began = time.monotonic()
    until(lambda: not run_folder.path.exists())
    assert time.monotonic() - began > 1.0


def test_a_faulty_driver_without_clients_ends_with_the_lease(start_hostless, monkeypatch):
    """It decides nothing any more, but that."""
    cluster = start_hostless(keep=True, lease=1.0, silence=1.0)
    run_folder = cluster._link.run_folder
    in_driver(cluster, lambda driver: driver.stop_deciding(ev.Ticked(), KeyError("x")))
    cluster.detach()
    until(lambda: not run_folder.path.exists())


def test_a_driver_that_ends_at_once_tells_its_kernel_why(start_hostless, monkeypatch, tmp_path):
    """Before that has connected, as when the discovery fails at its first look."""

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
    """A discovery that is not there: the lease would never run out."""
    cluster = start_hostless()
    with pytest.raises(nbe.UsageError, match="no-such-script"):
        nbe.Cluster.attach("quiet", discovery="./no-such-script")
    until(lambda: in_driver(cluster, lambda driver: len(driver._clients._open)) == 1)


def test_a_cluster_whose_lock_is_removed_ends(start_hostless, monkeypatch):
    """Nobody could find it any more."""
    monkeypatch.setattr(client_lease, "CHECK_INTERVAL", 0.05)
    cluster = start_hostless()
    cluster._link.run_folder.lock.unlink()
    until(lambda: cluster.status().reason == "stopped: its lock file was removed")


def test_a_status_that_is_read_late_is_not_shown_instead_of_a_newer_one(start_hostless):
    """One thread decodes the last status while another takes the next."""
    cluster = start_hostless()
    driver = cluster._link.connection
    old = driver._status
    cluster.scale(2, 3)
    driver._decoded = old, cluster.status()
    assert cluster.status().min == 2


def test_what_is_asked_before_a_connection_is_left_still_goes_out(start_hostless):
    """An order, and at once a detach: 20 times."""
    cluster = start_hostless(keep=True)
    for most in range(1, 21):
        other = nbe.Cluster.attach("quiet")
        other.order({"order": "scale", "max": most}, "a page")
        other.detach()
        until(lambda most=most: cluster.status().max == most)


def test_who_is_interrupted_while_attaching_is_not_attached(start_hostless, monkeypatch):
    """Ctrl-C while the driver does not greet: the lease of the cluster would never run out."""
    cluster = start_hostless()
    monkeypatch.setattr(Connection, "_await_greeting", lambda _: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            nbe.Cluster.attach("quiet")
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: in_driver(cluster, lambda driver: len(driver._clients._open)) == 1)
