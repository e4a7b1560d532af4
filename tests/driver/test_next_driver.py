"""A driver dies, and its cluster's clients get the next driver. The drivers run in threads."""

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
from tests.support.processes import run_folder
from tests.support.waiting import until

# A thread that is "killed" leaves open what the end of a process would close.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
THREADS = ("driver", "nbelastic-connection", "nbelastic-discovery-poller")


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Wait until the threads of a test have ended: they would find the next test's folder."""
    yield
    until(lambda: not [thread for thread in threading.enumerate() if thread.name in THREADS])
    gc.collect()


def kill_and_replace_driver(*clients) -> None:
    """Kill the driver of these clients' cluster, and wait until all of them use the next one."""
    dead = [client._link.connection for client in clients]
    driver_thread.kill_driver_of(clients[0])
    for client in clients:
        until(
            lambda client=client: client._link.connection not in dead, what=lambda client=client: client.status().reason
        )


def delay_next_driver(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Delay the next drivers: return an event that is set when one is about to start, and one that lets it start."""
    started, go_on = threading.Event(), threading.Event()
    launch = driver_link.start_driver_process

    def launch_late(*arguments):
        started.set()
        assert go_on.wait(10)
        return launch(*arguments)

    monkeypatch.setattr(driver_link, "start_driver_process", launch_late)
    return started, go_on


def test_the_next_driver_continues_the_job(start_hostless):
    """With the next driver `Cluster` and `Job` stay the same objects, with the same bounds and results."""
    cluster = start_hostless(keep=True)
    cluster.scale(2, 9)
    job = cluster.run(os.getpid)
    kill_and_replace_driver(cluster)
    assert (cluster.status().min, cluster.status().max) == (2, 9)
    assert cluster.job is job
    assert job.status == "running"
    end_job(cluster, job, Outcome(value=blob("done")))
    assert job.result(timeout=10) == ["done"]
    assert not job._driver.finished.is_set()


def test_files_of_pushed_values_are_removed_by_the_next_driver(start_hostless):
    """Those that an earlier driver has kept, when they are cleared; those that it has left over, at once."""
    cluster = start_hostless(keep=True)
    cluster.push(data=[1], more=[2])
    folder = run_folder(cluster) / "pushed"
    (kept,) = folder.iterdir()
    (folder / "left-over.pushed").touch()
    kill_and_replace_driver(cluster)
    assert [*folder.iterdir()] == [kept]
    cluster.push(data=[3])
    assert kept in [*folder.iterdir()]
    cluster.clear_setup()
    assert [*folder.iterdir()] == []


def test_another_cluster_of_the_same_name_is_not_taken_over(start_hostless):
    """A kernel that paused does not connect to another cluster that has taken the name meanwhile."""
    cluster = start_hostless(keep=True)
    job = cluster.run(os.getpid)
    go_on = threading.Event()
    replace = cluster._link.connection._on_loss
    cluster._link.connection._on_loss = lambda: go_on.wait(10) and replace()
    driver_thread.kill_driver_of(cluster)
    with nbe.Cluster.attach("quiet"):
        pass
    other = start_hostless(keep=True)
    go_on.set()
    with pytest.raises(nbe.ClusterStoppedError, match="another cluster has the name 'quiet' now"):
        job.result(timeout=10)
    cluster.stop()
    assert other.status().phase == "waiting"


def test_the_next_driver_has_the_newest_discovery(start_hostless, tmp_path):
    """The next driver uses the newest script, and knows of another kernel's object without making one."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    cluster = start_hostless(keep=True, discovery=str(script))
    script.with_name("e.sh").write_bytes(script.read_bytes())
    script.with_name("e.sh").chmod(0o755)
    nbe.Cluster.attach("quiet", discovery=str(script.with_name("e.sh"))).detach()
    kill_and_replace_driver(cluster)
    assert cluster._link.connection.arguments["discovery"].endswith("e.sh")
    cluster.stop()
    own = start_hostless("own", keep=True)
    with nbe.Cluster.attach("own") as other:
        own.detach()
        kill_and_replace_driver(other)
        assert other._link.connection.arguments["own discovery"]
        assert other.hosts == ()


def test_a_driver_that_dies_before_its_kernel_uses_it_is_replaced(start_hostless, monkeypatch):
    """If the next driver dies just after its greeting, another one continues the cluster and its job."""
    cluster = start_hostless(keep=True)
    job = cluster.run(os.getpid)
    use, died = Connection.use, []

    def use_late(connection, *arguments):
        if not died:
            died.append(connection)
            driver_thread.kill_driver_of(cluster)
            until(lambda: connection.died)
        use(connection, *arguments)

    first = cluster._link.connection
    monkeypatch.setattr(Connection, "use", use_late)
    driver_thread.kill_driver_of(cluster)
    until(lambda: died and cluster._link.connection not in (first, *died))
    assert job.status == "running"
    end_job(cluster, job, Outcome(value=blob(1)))
    assert job.result(timeout=10) == [1]


def test_an_error_at_a_replacement_ends_the_connection(start_hostless, monkeypatch):
    """After any error at a replacement every waiting call raises, so that none waits without end."""
    cluster = start_hostless(keep=True)
    job = cluster.run(os.getpid)
    with monkeypatch.context() as broken:
        broken.setattr("nbelastic.client.replacement.start_timeout", lambda _: 1 / 0)
        driver_thread.kill_driver_of(cluster)
        with pytest.raises(nbe.ClusterStoppedError, match="no other driver could take its place: ZeroDivisionError"):
            job.result(timeout=10)
    with nbe.Cluster.attach("quiet") as again:
        assert again.job.status == "running"


def test_a_detach_during_a_replacement_is_final(start_hostless, monkeypatch):
    """A kernel that detaches during a replacement does not connect to the next driver, whose lease then runs."""
    cluster = start_hostless(keep=True)
    job = cluster.run(os.getpid)
    started, go_on = delay_next_driver(monkeypatch)
    driver_thread.kill_driver_of(cluster)
    assert started.wait(10)
    detaching = threading.Thread(target=cluster.detach)
    detaching.start()
    detaching.join(5)
    assert not detaching.is_alive()
    go_on.set()
    until(lambda: job.status == "detached")
    until(lambda: not driver_of(cluster)._clients._open)
    nbe.Cluster.attach("quiet").stop()


def test_lines_of_the_last_driver_are_not_shown_again():
    """Line numbers continue and no line is shown twice, although the next driver knows fewer or other lines."""
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


def test_the_next_driver_uses_an_attached_discovery(start_hostless, tmp_path):
    """The next driver uses a discovery object of an attached kernel, unless a client has replaced it since."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    cluster = start_hostless(keep=True, discovery=str(script))
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as other:
        assert other._link.poller is not None
        kill_and_replace_driver(cluster, other)
        assert cluster._link.connection.arguments["own discovery"]
        until(lambda: other._link.poller._driver is other._link.connection)
        nbe.Cluster.attach("quiet", discovery=str(script)).detach()
        kill_and_replace_driver(cluster, other)
        assert "discovery" in other._link.connection.arguments
        until(lambda: not other._link.poller._thread.is_alive(), what="the end of the object's poller")


def test_a_driver_that_dies_while_its_kernel_begins_to_use_it(start_hostless, monkeypatch):
    """If two drivers die one soon after the other, the discovery object's hosts reach the newest driver."""
    cluster = start_hostless(keep=True)
    link, use, died = cluster._link, Connection.use, []

    def use_and_lose(connection, *arguments):
        use(connection, *arguments)
        if not died:
            died.append(connection)
            driver_thread.kill_driver(link.run_folder, 0)
            until(lambda: link.connection is not connection)

    first = link.connection
    monkeypatch.setattr(Connection, "use", use_and_lose)
    driver_thread.kill_driver(link.run_folder, 0)
    until(lambda: link.connection not in (first, *died))
    until(lambda: not first._reader.is_alive())
    until(lambda: link.poller._driver is link.connection, what="the poller of the newest driver")


def test_a_stop_request_reaches_the_next_driver(start_hostless, monkeypatch):
    """A request to stop the job or the cluster that follows the driver's death reaches the next driver."""
    cluster = start_hostless(keep=True)
    job = cluster.run(os.getpid)
    started, go_on = delay_next_driver(monkeypatch)
    driver_thread.kill_driver_of(cluster)
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
    driver_thread.kill_driver_of(cluster)
    assert started.wait(10)
    cluster.request_stop()
    go_on.set()
    until(lambda: cluster.status().phase == "finished")
    assert not cluster.died


@pytest.mark.parametrize("keep", [False, True])
def test_a_notebook_attaches_again_to_a_cluster_without_a_driver(start_hostless, keep):
    """After too many driver deaths %elastic_attach keeps the cluster, and %elastic_start too if it is a kept one."""
    cluster = start_hostless(keep=keep)
    job = cluster.run(os.getpid)
    for _ in range(MAX_LOSSES):
        kill_and_replace_driver(cluster)
    driver_thread.kill_driver_of(cluster)
    until(lambda: cluster.died)
    until(lambda: job.status == "detached")
    magics = ElasticMagics(InteractiveShell(), attach=lambda _: nbe.Cluster.attach("quiet"))
    magics.cluster = cluster
    magics._close_cluster(attach=not keep)
    with nbe.Cluster.attach("quiet") as again:
        assert again.job.status == "running"


def test_a_notebook_that_starts_another_cluster_stops_the_old_one(start_hostless):
    """A notebook that starts another cluster stops its old one, which is not kept and lost its drivers too often."""
    cluster = start_hostless()
    for _ in range(MAX_LOSSES):
        kill_and_replace_driver(cluster)
    driver_thread.kill_driver_of(cluster)
    until(lambda: cluster.died)
    magics = ElasticMagics(InteractiveShell())
    magics.cluster = cluster
    magics._close_cluster()
    assert "quiet" not in {info.name for info in nbe.Cluster.all()}


def test_the_snapshot_stays_until_the_next_driver_has_taken_over(start_hostless, monkeypatch):
    """A driver that has not taken over yet does not overwrite the driver snapshot with its own empty state."""
    cluster = start_hostless()
    cluster.scale(2, 9)
    state, found = run_folder(cluster) / SNAPSHOT_FILE, []
    before = state.read_bytes()

    def adopt(agents, _):
        agents._record(cmd.Record("proxy-started", "a TCP proxy was started again"))
        agents._save()
        found.append(state.read_bytes())

    monkeypatch.setattr(Agents, "adopt", adopt)
    kill_and_replace_driver(cluster)
    assert found == [before]
    assert (cluster.status().min, cluster.status().max) == (2, 9)


def fail_to_listen(*_):
    raise nbe.HostError("the driver cannot listen")


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_without_a_driver_kills_the_processes(start_hostless, monkeypatch, keep):
    """If no driver can be started, a stop kills the cluster's processes."""
    cluster = start_hostless(keep=keep)
    monkeypatch.setattr(driver_link, "start_driver_process", fail_to_listen)
    driver_thread.kill_driver_of(cluster)
    until(lambda: cluster.died)
    assert "3 other drivers could not take its place: the driver cannot listen" in cluster.status().reason
    with pytest.raises(nbe.ClusterStoppedError, match=": attach to it." if keep else ": start it."):
        cluster.scale(1, 2)
    cluster.stop()
    assert nbe.Cluster.all() == []
    assert not run_folder(cluster).exists()


def test_a_cluster_without_a_driver_is_started_anew(start_hostless, monkeypatch):
    """`start()` of a cluster that is not kept first ends the processes that its dead driver left."""
    cluster = start_hostless()
    with monkeypatch.context() as broken:
        broken.setattr(driver_link, "start_driver_process", fail_to_listen)
        driver_thread.kill_driver_of(cluster)
        until(lambda: cluster.died)
    cluster.start(wait=False)
    assert cluster.run(os.getpid).status == "running"
