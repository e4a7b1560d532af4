"""A driver that dies, and the next one: what becomes of those who are connected. The drivers run in threads."""

from __future__ import annotations

import gc
import os
import threading

import pytest
from IPython.core.interactiveshell import InteractiveShell

import nbelastic as nbe
from nbelastic.client import driver_link
from nbelastic.client.connection import Connection
from nbelastic.client.job_copy import JobCopy
from nbelastic.client.replacement import MAX_LOSSES
from nbelastic.core import commands as cmd
from nbelastic.driver.agents import Agents
from nbelastic.driver.results import Outcome
from nbelastic.notebook.magics import ElasticMagics
from nbelastic.protocol import client_messages as u
from nbelastic.protocol.local_clusters import SNAPSHOT_FILE
from nbelastic.protocol.output_buffer import Line
from tests.core.story import wid
from tests.driver.hostless_cluster import NoHosts
from tests.driver.raw_client import blob, driver_of, end_job
from tests.support import driver_thread
from tests.support.waiting import until

# A thread that is "killed" leaves open what the end of a process would close.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
THREADS = ("driver", "nbelastic-connection", "nbelastic-discovery-poller")


@pytest.fixture(autouse=True)
def alone():
    """No thread of one test, which would find the next test's folder, lives on."""
    yield
    until(lambda: not [thread for thread in threading.enumerate() if thread.name in THREADS])
    gc.collect()


def die(cluster) -> None:
    """Its driver is killed, and another one has taken over for those who are connected."""
    dead = cluster._link.connection
    driver_thread.kill_driver(cluster._link.run_folder, 0)
    until(lambda: cluster._link.connection is not dead)


def held_up(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """The next drivers are not there before somebody sets the second event; the first tells that one is about to start."""
    started, go_on = threading.Event(), threading.Event()
    launch = driver_link.start_driver_process

    def launch_late(*arguments):
        started.set()
        assert go_on.wait(10)
        return launch(*arguments)

    monkeypatch.setattr(driver_link, "start_driver_process", launch_late)
    return started, go_on


def test_the_next_driver_goes_on_where_the_last_one_was(start_hostless):
    """Of a kept cluster whose driver dies: the same `Cluster` and `Job`; bounds, setup cells and results are as they were."""
    cluster = start_hostless(keep=True)
    cluster.scale(2, 9)
    job = cluster.run(os.getpid)
    die(cluster)
    assert (cluster.status().min, cluster.status().max) == (2, 9)
    assert cluster.job is job
    assert job.status == "running"
    end_job(cluster, job, Outcome(value=blob("done")))
    assert job.result(timeout=10) == ["done"]
    assert not job._driver.finished.is_set()


def test_another_cluster_of_the_same_name_is_not_the_next_driver_s(start_hostless):
    """The dead one's kernel pauses, and somebody stops what is left of it and starts another one."""
    cluster = start_hostless(keep=True)
    job = cluster.run(os.getpid)
    go_on = threading.Event()
    replace = cluster._link.connection._on_loss
    cluster._link.connection._on_loss = lambda: go_on.wait(10) and replace()
    driver_thread.kill_driver(cluster._link.run_folder, 0)
    with nbe.Cluster.attach("quiet"):
        pass
    other = start_hostless(keep=True)
    go_on.set()
    with pytest.raises(nbe.ClusterStoppedError, match="another cluster has the name 'quiet' now"):
        job.result(timeout=10)
    cluster.stop()
    assert other.status().phase == "waiting"


def test_the_next_driver_has_the_newest_discovery(start_hostless, tmp_path):
    """Not that of the kernel which happens to start it; and objects of another kernel's are not made up."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    cluster = start_hostless(keep=True, discovery=str(script))
    script.with_name("e.sh").write_bytes(script.read_bytes())
    script.with_name("e.sh").chmod(0o755)
    nbe.Cluster.attach("quiet", discovery=str(script.with_name("e.sh"))).detach()
    die(cluster)
    assert cluster._link.connection.arguments["discovery"].endswith("e.sh")
    cluster.stop()
    own = start_hostless("own", keep=True)
    with nbe.Cluster.attach("own") as other:
        own.detach()
        die(other)
        assert other._link.connection.arguments["own discovery"]
        assert other.hosts == ()


def test_a_driver_that_dies_before_its_kernel_uses_it_is_replaced(start_hostless, monkeypatch):
    """As soon as it has greeted: neither the cluster nor its job is lost."""
    cluster = start_hostless(keep=True)
    job = cluster.run(os.getpid)
    use, died = Connection.use, []

    def use_late(connection, *arguments):
        if not died:
            died.append(connection)
            driver_thread.kill_driver(cluster._link.run_folder, 0)
            until(lambda: connection.died)
        use(connection, *arguments)

    first = cluster._link.connection
    monkeypatch.setattr(Connection, "use", use_late)
    driver_thread.kill_driver(cluster._link.run_folder, 0)
    until(lambda: cluster._link.connection not in (first, *died))
    assert job.status == "running"
    end_job(cluster, job, Outcome(value=blob(1)))
    assert job.result(timeout=10) == [1]


def test_what_goes_wrong_at_a_replacement_ends_the_connection(start_hostless, monkeypatch):
    """Whatever it is: nobody waits for ever."""
    cluster = start_hostless(keep=True)
    job = cluster.run(os.getpid)
    with monkeypatch.context() as broken:
        broken.setattr("nbelastic.client.replacement.start_timeout", lambda _: 1 / 0)
        driver_thread.kill_driver(cluster._link.run_folder, 0)
        with pytest.raises(nbe.ClusterStoppedError, match="no other driver could take its place: ZeroDivisionError"):
            job.result(timeout=10)
    with nbe.Cluster.attach("quiet") as again:
        assert again.job.status == "running"


def test_who_detaches_while_a_driver_is_replaced_is_detached(start_hostless, monkeypatch):
    """Nobody is connected any more, or the lease would never run."""
    cluster = start_hostless(keep=True)
    job = cluster.run(os.getpid)
    started, go_on = held_up(monkeypatch)
    driver_thread.kill_driver(cluster._link.run_folder, 0)
    assert started.wait(10)
    detaching = threading.Thread(target=cluster.detach)
    detaching.start()
    detaching.join(5)
    assert not detaching.is_alive()
    go_on.set()
    until(lambda: job.status == "detached")
    until(lambda: not driver_of(cluster)._clients._open)
    nbe.Cluster.attach("quiet").stop()


def test_lines_of_the_last_driver_are_not_told_again():
    """Numbers go on, though the next driver may know fewer of the lines, and some that the last one has not told."""
    copy = JobCopy("job-1")
    w = wid("a/0#1")

    def update(numbers):
        return u.JobUpdate("job-1", [(w, Line(number, "out", str(text), 0)) for number, text in numbers])

    copy.apply(update([(1, "a"), (2, "b"), (3, "c")]), is_complete=True)
    copy.apply(update([(1, "a"), (2, "b"), (3, "c"), (4, "d")]), is_complete=True)
    assert [line.text for _, line in copy.output.since(3)] == ["d"]
    copy.apply(update([(1, "c"), (2, "d")]), is_complete=True)
    assert copy.output.since(4) == []
    copy.apply(update([(3, "e")]), is_complete=False)
    assert [line.text for _, line in copy.output.since(4)] == ["e"]
    copy.apply(update([(1, "e"), (2, "f")]), is_complete=True)
    assert [line.text for _, line in copy.output.since(5)] == ["f"]
    copy.apply(update([]), is_complete=True)
    copy.apply(update([(1, "g")]), is_complete=False)
    assert [line.text for _, line in copy.output.since(6)] == ["g"]


def test_a_discovery_that_was_attached_with_is_the_next_driver_s(start_hostless, tmp_path):
    """An object is written down as one; and one that somebody has replaced since does not come back with the next driver."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    cluster = start_hostless(keep=True, discovery=str(script))
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as other:
        assert other._link.poller is not None
        die(cluster)
        assert cluster._link.connection.arguments["own discovery"]
        until(
            lambda: other._link.connection.number == cluster._link.connection.number and other._link.poller is not None
        )
        nbe.Cluster.attach("quiet", discovery=str(script)).detach()
        die(cluster)
        until(lambda: not other._link.connection.died and "discovery" in other._link.connection.arguments)
        until(lambda: not other._link.poller._thread.is_alive())


def test_an_order_to_stop_reaches_the_next_driver(start_hostless, monkeypatch):
    """Of the cluster, or of its job: it was given just as the driver had died."""
    cluster = start_hostless(keep=True)
    job = cluster.run(os.getpid)
    started, go_on = held_up(monkeypatch)
    driver_thread.kill_driver(cluster._link.run_folder, 0)
    assert started.wait(10)
    with pytest.raises(nbe.DriverLostError, match="try again"):
        cluster.order({"do": "scale", "min": 2}, "a test")
    stopping = threading.Thread(target=job.stop)
    stopping.start()
    go_on.set()
    stopping.join(10)
    assert job.wait(10).status == "stopped"
    started.clear()
    go_on.clear()
    driver_thread.kill_driver(cluster._link.run_folder, 0)
    assert started.wait(10)
    cluster.request_stop()
    go_on.set()
    until(lambda: cluster.status().phase == "finished")
    assert not cluster.died


@pytest.mark.parametrize("keep", [False, True])
def test_a_notebook_attaches_again_to_what_lives_on(start_hostless, keep):
    """Its own cluster's drivers have died too often: %elastic_attach does not stop it first, nor does %elastic_start a kept one."""
    cluster = start_hostless(keep=keep)
    job = cluster.run(os.getpid)
    for _ in range(MAX_LOSSES):
        die(cluster)
    driver_thread.kill_driver(cluster._link.run_folder, 0)
    until(lambda: cluster.died)
    until(lambda: job.status == "detached")
    magics = ElasticMagics(InteractiveShell(), attach=lambda _: nbe.Cluster.attach("quiet"))
    magics.cluster = cluster
    magics._close_cluster(attach=not keep)
    with nbe.Cluster.attach("quiet") as again:
        assert again.job.status == "running"


def test_a_notebook_that_starts_another_cluster_stops_what_lives_on(start_hostless):
    """Its own one, which is not kept, and whose drivers have died too often."""
    cluster = start_hostless()
    for _ in range(MAX_LOSSES):
        die(cluster)
    driver_thread.kill_driver(cluster._link.run_folder, 0)
    until(lambda: cluster.died)
    magics = ElasticMagics(InteractiveShell())
    magics.cluster = cluster
    magics._close_cluster()
    assert "quiet" not in {info.name for info in nbe.Cluster.all()}


def test_what_is_saved_stays_until_the_next_driver_has_taken_over(start_hostless, monkeypatch):
    """One that dies before has not put its own empty world in the place of the cluster's."""
    cluster = start_hostless()
    cluster.scale(2, 9)
    state, found = cluster._link.run_folder.path / SNAPSHOT_FILE, []
    before = state.read_bytes()

    async def adopt(agents, _):
        agents._record(cmd.Record("gate-started", "a gate was started again"))
        agents._save()
        found.append(state.read_bytes())

    monkeypatch.setattr(Agents, "adopt", adopt)
    die(cluster)
    assert found == [before]
    assert (cluster.status().min, cluster.status().max) == (2, 9)


def unable(*_):
    raise nbe.HostError("the driver cannot listen")


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_for_which_no_driver_can_be_started(start_hostless, monkeypatch, keep):
    """Whoever stops a cluster wants nothing of it to stay: its processes are killed."""
    cluster = start_hostless(keep=keep)
    monkeypatch.setattr(driver_link, "start_driver_process", unable)
    driver_thread.kill_driver(cluster._link.run_folder, 0)
    until(lambda: cluster.died)
    assert "3 other drivers could not take its place: the driver cannot listen" in cluster.status().reason
    with pytest.raises(nbe.ClusterStoppedError, match=": attach to it." if keep else ": start it."):
        cluster.scale(1, 2)
    cluster.stop()
    assert nbe.Cluster.all() == []
    assert not cluster._link.run_folder.path.exists()


def test_a_cluster_without_a_driver_is_started_anew(start_hostless, monkeypatch):
    """It is not kept: what its dead driver has left is ended first."""
    cluster = start_hostless()
    with monkeypatch.context() as broken:
        broken.setattr(driver_link, "start_driver_process", unable)
        driver_thread.kill_driver(cluster._link.run_folder, 0)
        until(lambda: cluster.died)
    cluster.start(wait=False)
    assert cluster.run(os.getpid).status == "running"
