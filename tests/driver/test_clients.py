"""The driver's socket: what a client is told, what it asks, and what it cannot do to the driver or to others."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbelastic as nbe
from nbelastic.client.connection import Connection
from nbelastic.core import commands as cmd
from nbelastic.driver import abandonment, clients
from nbelastic.driver.results import Outcome
from nbelastic.protocol import events as ev
from nbelastic.protocol import requests as r
from nbelastic.protocol import updates as u
from nbelastic.protocol import wire
from nbelastic.protocol.ids import HostSpec
from nbelastic.system import pickling
from nbelastic.system.files import replace_private
from tests.core.story import wid
from tests.driver.quiet import NoHosts
from tests.support import inside
from tests.support.waiting import until, until_async


def driver_of(cluster):
    return inside.threads[cluster.name].driver


def in_driver(cluster, act):
    """What `act(driver)` gives, done in the driver's thread."""
    done: Future[Any] = Future()
    thread = inside.threads[cluster.name]

    def run() -> None:
        try:
            done.set_result(act(thread.driver))
        except Exception as error:
            done.set_exception(error)

    thread._loop.call_soon_threadsafe(run)
    return done.result(10)


class Raw:
    """A client that says what it likes."""

    def __init__(self, cluster: nbe.Cluster) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        folder = os.open(cluster._run_dir.path, os.O_RDONLY)
        self.socket.connect(u.socket_in(folder))
        os.close(folder)
        self.socket.settimeout(10)
        self._frames, self._messages = u.Frames(u.FROM_DRIVER), []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def says(self, message: u.ToDriver) -> None:
        self.socket.sendall(u.frame(message))

    def hears(self) -> u.ToClient | None:
        """The next message; None if the driver has hung up."""
        while not self._messages:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._messages += self._frames.feed(data)
        return self._messages.pop(0)


def test_who_may_connect(quiet):
    """The socket is its owner's alone, in a folder that is."""
    path = quiet()._run_dir.path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / u.SOCKET).stat().st_mode) == 0o600


def test_a_long_path_is_no_obstacle(quiet, monkeypatch, tmp_path):
    """A socket's path may have 107 characters, and a temporary folder's may be longer."""
    base = tmp_path / ("x" * 100)
    base.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(base))
    cluster = quiet("y" * 100)
    cluster.scale(2, 3)
    assert cluster.status().min == 2


@pytest.mark.parametrize("said", [b"\xff" * 8, u.LENGTH.pack(3) + b"abc", u.LENGTH.pack(0), b"GET / HTTP/1.1\r\n\r\n"])
def test_nonsense_costs_its_own_connection(quiet, said):
    """And nobody else anything."""
    cluster = quiet()
    with Raw(cluster) as raw:
        raw.socket.sendall(said)
        if not said.startswith(b"GET"):
            assert raw.hears() is None
    cluster.scale(2, 3)
    assert cluster.status().min == 2


def test_a_client_of_another_version_is_refused(quiet, monkeypatch):
    """In one line that says what to do; and one that has not said hello is not answered."""
    cluster = quiet()
    with monkeypatch.context() as other:
        other.setattr(u, "language", iter(["other", "ours"]).__next__)  # the client's, then the driver's
        with pytest.raises(nbe.UsageError, match="their messages differ: use nbelastic"):
            Connection(cluster._run_dir.path)
    with Raw(cluster) as raw:
        raw.says(u.Ask(1, u.encoded(r.Stop("nobody"))))
        raw.says(u.Hello("1", u.language()))
        assert isinstance(raw.hears(), u.Welcome)
        assert isinstance(raw.hears(), u.Update)
    assert cluster.status().phase == "waiting"


def test_an_update_has_what_is_new(quiet):
    """The first has all there is; later ones only what has changed, the last lines without an end too."""
    cluster = quiet()
    job = cluster.run(os.getpid)

    def prints(text, end):
        return lambda driver: driver._on_message(
            "worker/a/0#1", wire.WorkerOutput(wid("a/0#1"), "out", text, end, job.name, 0)
        )

    in_driver(cluster, lambda driver: setattr(driver, "_is_known", lambda _: True))
    in_driver(cluster, prints("one\ntwo\nthr", 11))
    with Raw(cluster) as raw:
        raw.says(u.Hello("1", u.language()))
        raw.hears()
        first = raw.hears()
        assert first.count == len(first.events) == len(cluster.events)
        (update,) = first.jobs
        assert [line.text for _, line in update.lines] == ["one", "two"]
        assert [line.text for _, line in update.rests] == ["thr"]
        in_driver(cluster, prints("ee\n", 14))
        second = raw.hears()
        assert (second.events, second.setup) == ([], None)
        (update,) = second.jobs
        assert [line.text for _, line in update.lines] == ["three"]
        assert [line.text for _, line in update.rests] == [""]
    until(lambda: job.logs() == "a/0#1 | one\na/0#1 | two\na/0#1 | three")


def test_the_consequence_is_known_before_the_answer(quiet):
    """Whoever has given an order sees what has become of it as soon as that returns: 100 times."""
    cluster = quiet()
    for most in range(1, 101):
        cluster.scale(1, most)
        assert cluster.status().max == most
        assert f"max {most}" in cluster.events[-1].text


def test_who_does_not_read_costs_nothing(quiet):
    """A stopped kernel: the driver keeps nothing for it, and tells it all that it still has when it reads again."""
    cluster = quiet()
    with Raw(cluster) as raw:
        raw.says(u.Hello("1", u.language()))
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
            message = raw.hears()
            heard += message.events if isinstance(message, u.Update) else []
        assert heard == cluster.events


def test_who_cancels_is_not_answered(quiet):
    """Nobody waits any more: the driver forgets the question."""
    cluster = quiet()
    waiting = lambda: in_driver(cluster, lambda driver: len(driver._pending))
    before = waiting()
    with pytest.raises(nbe.WaitTimeoutError):
        cluster.wait(3, timeout=0.1)
    cluster.scale(1, 2)  # what was said before has been heard by then
    in_driver(cluster, lambda driver: driver._pending.check_and_publish())
    assert waiting() == before


def test_who_goes_away_takes_its_questions_along(quiet):
    cluster = quiet()
    with Raw(cluster) as raw:
        raw.says(u.Hello("1", u.language()))
        for number in (1, 2):
            raw.says(u.Ask(number, u.encoded(r.WaitForWorld(3))))
        until(lambda: in_driver(cluster, lambda driver: len(driver._pending)) == 2)
    until(
        lambda: in_driver(cluster, lambda driver: (driver._pending.check_and_publish(), len(driver._pending))[1]) == 0
    )
    assert in_driver(cluster, lambda driver: len(driver._clients._greeted)) == 1
    assert "driver-error" not in [event.kind for event in cluster.events]


def ended(cluster, job, outcome):
    """The job is over, with this outcome on its only worker."""

    def end(driver):
        run = driver.runs[job.name]
        run.add_outcome(wid("a/0#1"), outcome)
        run.end(
            cmd.EndJob(job.name, "failed" if outcome.error else "succeeded", "it failed", (wid("a/0#1"),), wid("a/0#1"))
        )
        driver.post(ev.JobStopRequested(job.name, "the test has ended it"))  # for the world
        driver._pending.check_and_publish()

    in_driver(cluster, end)


def blob(value, path: Path | None = None) -> wire.Blob:
    packed = pickling.pack(value)
    if path is None:
        return wire.Blob(pickling.size(packed), b"".join(packed))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_private(path, packed)
    return wire.Blob(pickling.size(packed), path=str(path))


@pytest.mark.parametrize("where", ["message", "file"])
def test_a_result_outlives_its_cluster(quiet, where):
    """All clients have it, in a file or not, also when the cluster is stopped at that moment and its folder removed."""
    cluster = quiet()
    job = cluster.run(os.getpid)
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as other:
        path = cluster._run_dir.path / "results" / job.name / "value" if where == "file" else None
        ended(cluster, job, Outcome(value=blob({"loss": 0.5}, path)))
        cluster.stop()
        assert not cluster._run_dir.path.exists()
        assert job.result(timeout=10) == other.job.result(timeout=10) == [{"loss": 0.5}]


def test_a_file_that_is_gone_is_an_error_of_the_job(quiet):
    """And not one of the thread that reads."""
    cluster = quiet()
    job = cluster.run(os.getpid)
    ended(cluster, job, Outcome(value=wire.Blob(7, path=str(cluster._run_dir.path / "nowhere"))))
    with pytest.raises(nbe.JobError, match=r"succeeded, but its results cannot be read: .*No such file"):
        job.result(timeout=10)
    cluster.scale(2, 3)
    assert cluster.status().min == 2


def test_the_error_of_a_job_is_whole(quiet):
    """With its rank, its worker and the remote traceback; every client has one of its own."""
    cluster = quiet()
    job = cluster.run(os.getpid)
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as other:
        ended(cluster, job, Outcome("ValueError: no", "the remote traceback"))
        for each in (job, other.job):
            with pytest.raises(nbe.JobError, match="job-1 failed: it failed") as caught:
                each.result(timeout=10)
            error = caught.value
            assert (error.rank, error.worker, error.remote_traceback) == (0, "a/0#1", "the remote traceback")


def test_who_leaves_a_cluster_that_is_not_kept(quiet):
    """One that has attached to it leaves it as it is; its own kernel cannot."""
    cluster = quiet()
    other = nbe.Cluster.attach("quiet", discovery=NoHosts())
    other.close()
    assert other._driver is None
    with pytest.raises(nbe.UsageError, match="is not kept: start it with keep=True"):
        cluster.detach()
    assert cluster.status().phase == "waiting"


class Own:
    """A discovery of the user's own."""

    found: tuple[HostSpec, ...] = ()
    fails = False
    asked = 0

    async def hosts(self):
        self.asked += 1
        if self.fails:
            raise RuntimeError("no network")
        return self.found


def test_a_discovery_in_a_kernel(quiet):
    """What it finds, that it fails and that it answers again is said to the driver; it ends with the cluster."""
    hosts = Own()
    cluster = quiet(discovery=hosts)
    kinds = lambda: [event.kind for event in cluster.events]
    until(lambda: hosts.asked)
    hosts.fails = True
    until(lambda: "discovery-failed" in kinds())
    hosts.fails = False
    until(lambda: "discovery-recovered" in kinds())
    threads = {thread.name for thread in threading.enumerate()}
    assert "nbelastic-finder" in threads
    in_driver(cluster, lambda driver: driver.post(ev.StopRequested("by the driver itself")))
    until(lambda: "nbelastic-finder" not in {thread.name for thread in threading.enumerate()})


def test_a_kept_cluster_ends_with_its_lease(quiet):
    """Nobody is connected to it for so long: it stops. Somebody who comes in time begins the lease anew."""
    cluster = quiet(keep=True, lease=1.5, silence=1.0)
    run_dir = cluster._run_dir
    cluster.detach()
    time.sleep(1.0)
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as other:
        time.sleep(1.0)
        assert other.status().phase == "waiting"
        other.detach()
    began = time.monotonic()
    until(lambda: not run_dir.path.exists())
    assert time.monotonic() - began > 1.0


def test_who_hears_nothing_while_several_jobs_end_does_not_wait_for_ever(quiet):
    """A kernel that is stopped, while others run jobs: the driver keeps the last one alone, and says so of the others."""
    cluster = quiet()
    job = cluster.run(os.getpid)
    there = lambda: in_driver(cluster, lambda driver: set(driver._clients._greeted))
    before = there()
    with nbe.Cluster.attach("quiet") as other:
        (late,) = there() - before
        first = other.job
        in_driver(cluster, lambda _: late.pause_writing())
        for _ in range(3):
            job.stop()
            job.wait(timeout=10)
            job = cluster.run(os.getpid)
        in_driver(cluster, lambda _: late.resume_writing())
        with pytest.raises(nbe.ClusterStoppedError, match="job-1 has ended, and the driver has forgotten how"):
            first.result(timeout=10)
        assert other.job.name == job.name == "job-4"
        other.detach()


def test_what_cannot_be_text_is_told_all_the_same(quiet):
    """A file name that is no Unicode, in a reason: it is shown as far as it can be, and later news come as well."""
    cluster = quiet()
    in_driver(cluster, lambda driver: driver.record(cmd.Record("noted", "no file 'a\udcffb'")))
    until(lambda: "no file 'a?b'" in [event.text for event in cluster.events])
    cluster.scale(2, 3)
    assert cluster.status().min == 2


def test_numbers_of_other_libraries_are_numbers(quiet):
    """And what cannot be sent is refused in one line."""
    cluster = quiet(min=np.int64(3), silence=np.float32(8))
    assert cluster.status().min == 3
    cluster.scale(np.int32(2))
    assert cluster.status().min == 2
    with pytest.raises(nbe.UsageError, match="the request is invalid: Expected `int"):
        cluster.scale(max=1 << 70)
    with pytest.raises(nbe.UsageError, match=r"cannot be asked of the driver: <object .*> cannot be sent"):
        cluster.scale(max=object())


def test_an_answer_that_cannot_be_understood_ends_the_connection(quiet, monkeypatch, caplog):
    """A fault in the client's own code: who waits is told, and nobody waits for ever."""
    cluster = quiet()
    monkeypatch.setitem(r.ANSWERS, r.Scale, list[int])
    with pytest.raises(nbe.ClusterStoppedError, match="the connection to its driver failed"):
        cluster.scale(2, 3)
    assert {record.message for record in caplog.records if record.exc_info} == {
        "the connection to the driver of 'quiet' has a fault"
    }
    assert cluster.status().phase == "finished"
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as again:
        assert again.status().min == 2
        again.stop()


@pytest.mark.parametrize(
    "ask",
    [
        lambda cluster: cluster.scale(max="3"),
        lambda cluster: cluster.wait("2"),
        lambda cluster: cluster.restart(3),
        lambda cluster: cluster.remove_host(None),
        lambda cluster: cluster.execute("1", setup=True, key=5),
    ],
)
def test_a_wrong_kind_of_argument_costs_its_own_call(quiet, ask):
    """It is refused in one line, and the cluster is as before."""
    cluster = quiet()
    with pytest.raises(nbe.UsageError, match="the request is invalid: Expected"):
        ask(cluster)
    cluster.scale(2, 3)
    assert cluster.status().min == 2


def test_a_number_that_is_no_integer_of_64_bits_keeps_nobody_from_being_told(quiet):
    """A total that somebody has reported: it is none, and updates go on."""
    cluster = quiet()
    in_driver(cluster, lambda driver: driver.telemetry.add_report({"total": 1e30, "loss": 0.5}))
    cluster.scale(2, 3)
    assert (cluster.status().total, cluster.status().report) == (None, {"loss": 0.5})


def test_a_faulty_driver_without_clients_ends_with_the_lease(quiet, monkeypatch):
    """It decides nothing any more, but that."""
    cluster = quiet(keep=True, lease=1.0, silence=1.0)
    run_dir = cluster._run_dir
    in_driver(cluster, lambda driver: driver.stop_deciding(ev.Ticked(), KeyError("x")))
    cluster.detach()
    until(lambda: not run_dir.path.exists())


def test_a_driver_that_ends_at_once_tells_its_kernel_why(quiet, monkeypatch, tmp_path):
    """Before that has connected, as when the discovery fails at its first look."""

    def connect_late(*arguments):
        thread = inside.threads["quiet"]
        thread.ask(ev.StopRequested("the inventory is down"))
        until(lambda: thread.driver.cluster.phase == "finished")
        return Connection(*arguments)

    monkeypatch.setattr(inside, "Connection", connect_late)
    cluster = nbe.Cluster(name="quiet", discovery=NoHosts(), log_dir=tmp_path / "logs").start(wait=False)
    until(lambda: cluster.status().phase == "finished")
    assert cluster.status().reason == "stopped: the inventory is down"


def test_an_attach_that_fails_leaves_no_connection(quiet):
    """A discovery that is not there: the lease would never run out."""
    cluster = quiet()
    with pytest.raises(nbe.UsageError, match="no-such-script"):
        nbe.Cluster.attach("quiet", discovery="./no-such-script")
    until(lambda: in_driver(cluster, lambda driver: len(driver._clients._open)) == 1)


def test_an_attach_with_a_script_has_hosts_come_from_there(quiet, tmp_path):
    """From now on, whatever said so before."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    cluster = quiet()
    until(
        lambda: in_driver(cluster, lambda driver: driver.cluster.discovered)
    )  # else the failure would end the cluster
    with nbe.Cluster.attach("quiet", discovery=str(script)) as other:
        until(lambda: any("hosts.sh failed with exit code 1" in event.text for event in cluster.events))
        other.detach()


class Slow:
    """A discovery that finds a host only when `go` is set; `looks` counts its answers."""

    def __init__(self, *hosts):
        self.go, self.looks, self._hosts = threading.Event(), 0, tuple(HostSpec(host, 1) for host in hosts)

    async def hosts(self):
        await until_async(self.go.is_set)
        self.looks += 1
        return self._hosts


@pytest.mark.parametrize("own", [False, True])
def test_who_found_hosts_before_is_not_heard_any_more(quiet, tmp_path, own):
    """Its first look ends when somebody else has said where hosts come from: a script, or an object of another kernel."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    before, after = Slow("nowhere.invalid"), Slow()
    after.go.set()
    cluster = quiet(discovery=before)
    with nbe.Cluster.attach("quiet", discovery=after if own else str(script)) as other:
        if own:  # it takes the other's place with its first word
            until(
                lambda: in_driver(
                    cluster,
                    lambda driver: driver._parts.discoveries._client_key == driver._parts.discoveries._next_client_key,
                )
            )
        before.go.set()
        until(lambda: before.looks > 1)
        assert (list(cluster.hosts), [event.kind for event in cluster.events if event.host]) == ([], [])
        other.detach()
    after.go.set()


def test_who_finds_hosts_is_heard_until_another_says_something(quiet):
    """Somebody attaches with an object that never answers, or that fails: hosts come from where they came from."""
    before, after = Slow("nowhere.invalid"), Slow()
    cluster = quiet(discovery=before)
    with nbe.Cluster.attach("quiet", discovery=after) as other:
        before.go.set()
        until(lambda: [host.name for host in cluster.hosts] == ["nowhere.invalid"])
        other.detach()
    after.go.set()


def test_values_stay_until_everybody_has_them(quiet):
    """A kernel that is stopped while others run the next jobs finds the file of the one that it was told of."""
    cluster = quiet()
    there = lambda: in_driver(cluster, lambda driver: set(driver._clients._greeted))
    before = there()
    with nbe.Cluster.attach("quiet") as other:
        (slow,) = there() - before
        folder = cluster._run_dir.path / "results"
        for number in range(1, 5):
            job = cluster.run(os.getpid)
            if number == 2:
                told = lambda _: slow._jobs.get("job-1", (0, 0, False))[2] and not slow.unmapped_jobs
                until(lambda: in_driver(cluster, told))  # it has said that it has it, and is to be as if it had not
                in_driver(cluster, lambda _: setattr(slow, "unmapped_jobs", {"job-1"}))
            ended(cluster, job, Outcome(value=blob(number, folder / job.name / "value")))
            assert job.result(timeout=10) == [number]
        assert sorted(path.name for path in folder.iterdir()) == ["job-1", "job-3", "job-4"]
        other.detach()
    until(lambda: sorted(path.name for path in folder.iterdir()) == ["job-3", "job-4"])


def test_a_cluster_whose_lock_is_removed_ends(quiet, monkeypatch):
    """Nobody could find it any more."""
    monkeypatch.setattr(abandonment, "CHECK_INTERVAL", 0.05)
    cluster = quiet()
    cluster._run_dir.lock.unlink()
    until(lambda: cluster.status().reason == "stopped: its lock file was removed")


def test_a_status_that_is_read_late_is_not_shown_instead_of_a_newer_one(quiet):
    """One thread decodes the last status while another takes the next."""
    cluster = quiet()
    driver = cluster._driver
    old = driver._status
    cluster.scale(2, 3)
    driver._decoded = old, cluster.status()
    assert cluster.status().min == 2


def test_what_is_asked_before_a_connection_is_left_still_goes_out(quiet):
    """An order, and at once a detach: 20 times."""
    cluster = quiet(keep=True)
    for most in range(1, 21):
        other = nbe.Cluster.attach("quiet")
        other.order({"order": "scale", "max": most}, "a page")
        other.detach()
        until(lambda most=most: cluster.status().max == most)


def test_who_is_interrupted_while_attaching_is_not_attached(quiet, monkeypatch):
    """Ctrl-C while the driver does not greet: the lease of the cluster would never run out."""
    cluster = quiet()
    monkeypatch.setattr(Connection, "_meet", lambda _: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            nbe.Cluster.attach("quiet")
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: in_driver(cluster, lambda driver: len(driver._clients._open)) == 1)


def test_what_a_dead_driver_has_left_of_old_jobs_is_removed(quiet):
    """Results of jobs that the next driver does not know."""
    cluster = quiet(keep=True)
    folder = cluster._run_dir.path / "results"
    for name in ("job-1", "job-2"):
        job = cluster.run(os.getpid)
        ended(cluster, job, Outcome(value=blob(name, folder / name / "value")))
        job.result(timeout=10)
    inside.kill_driver(cluster._run_dir, 0)
    with nbe.Cluster.attach("quiet", discovery=NoHosts()):
        assert [path.name for path in folder.iterdir()] == ["job-2"]


def test_a_request_that_is_too_long_costs_its_own_call(quiet):
    cluster = quiet()
    with pytest.raises(nbe.UsageError, match=r"it has \d+ bytes, and 16777216 are possible"):
        cluster.restart("x" * (u.LONGEST + 1))
    cluster.scale(2, 3)
    assert cluster.status().min == 2


def test_a_script_that_was_attached_with_is_remembered(quiet, tmp_path):
    """Who attaches later need not say it again, also after the driver has died."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    cluster = quiet(keep=True)
    nbe.Cluster.attach("quiet", discovery=str(script)).detach()
    assert nbe.Cluster.attach("quiet")._arguments["discovery"] == str(script)
    inside.kill_driver(cluster._run_dir, 0)
    with nbe.Cluster.attach("quiet") as again:
        assert again._arguments["discovery"] == str(script)
