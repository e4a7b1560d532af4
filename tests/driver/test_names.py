"""A cluster's name, its run folder and its lock: taken, released, taken again."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

import nbelastic as nbe
from nbelastic.client import kernel_end
from nbelastic.client.find_driver import connect_to_driver
from nbelastic.client.job_copy import JobCopy
from nbelastic.driver.process import prepare
from nbelastic.protocol import client_messages, local_clusters, run_folder
from nbelastic.protocol.driver_start import Start
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.system.folder_paths import batch_folder, process_folder, user_folder
from nbelastic.system.private_sockets import bind_in, connect_in
from tests.driver.hostless_cluster import NoHosts
from tests.support.driver_thread import use_driver_threads


def until_finished(cluster):
    deadline = time.monotonic() + 20
    while cluster.status().phase != "finished" or not cluster._link.newest.finished.is_set():
        assert time.monotonic() < deadline, cluster.status().reason
        time.sleep(0.01)


@pytest.mark.parametrize("keep", [False, True])
def test_a_cluster_that_others_have_stopped_can_be_started_again(start_hostless, keep):
    """After the dashboard stopped a cluster, its name and keys are released, and `start()` works again."""
    cluster = start_hostless(keep=keep)
    folder = RunFolder(cluster.name)
    cluster.request_stop("the dashboard")
    until_finished(cluster)
    assert not folder.path.exists()
    assert not folder.lock.exists()
    with pytest.raises(nbe.ClusterStoppedError, match=r"is not running \(stopped by the dashboard\): start it"):
        cluster.execute("1")
    cluster.start(wait=False)
    assert cluster.status().phase == "waiting"


def test_with_leaves_nothing_if_the_start_fails(clusters_folder, monkeypatch):
    """The block does not begin, and no name may be bound to the cluster: without a stop it would run until the kernel ends."""
    use_driver_threads(monkeypatch)
    options = {"discovery": NoHosts(), "elastic_timeout": 0.1, "log_dir": clusters_folder / "logs"}
    with pytest.raises(nbe.WaitTimeoutError, match="1 ready workers"), nbe.Cluster(name="digits", **options):
        pass
    assert nbe.Cluster.all() == []


def test_the_name_of_a_stopped_cluster_is_free(start_hostless):
    """A new cluster may take the name of a stopped one, and another stop of the old one does not affect it."""
    old = start_hostless("digits")
    old.request_stop()
    until_finished(old)
    new = start_hostless("digits")
    old.stop()
    assert new.status().phase == "waiting"
    assert RunFolder(new.name).driver == os.getpid()
    assert RunFolder(new.name).path.exists()


def test_a_driver_that_takes_over_too_late_leaves_nothing(start_hostless):
    """A driver that would take over a cluster which has just been stopped gives up, and leaves no lock."""
    cluster = start_hostless(keep=True)
    link = cluster._link
    late = Start(link.configuration.settings, link.configuration.arguments, takes_over=True)
    cluster.stop()
    with pytest.raises(nbe.UsageError, match="there is no cluster 'quiet' here"):
        prepare(late)
    assert not RunFolder("quiet").lock.exists()


def fork_child():
    """Fork this process; return the child's pid."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.pause()
        finally:
            os._exit(0)
    return pid


def test_a_forked_child_does_not_keep_a_detached_cluster(start_hostless):
    """A client can attach to a cluster although a forked child of the kernel still runs."""
    cluster = start_hostless(keep=True)
    child = fork_child()
    try:
        cluster.detach()
        with nbe.Cluster.attach("quiet", discovery=NoHosts()) as again:
            assert again.status().phase == "waiting"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_wait_for_a_job(start_hostless):
    """The child, as of `multiprocessing`, has no connection and would wait without an end. It gets an error."""
    cluster = start_hostless()
    cluster._link.connection.jobs["job-1"] = JobCopy("job-1")
    job = cluster.job
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        refusals = 0
        try:
            for wait in (job.result, lambda: asyncio.run(job._await_end())):
                with pytest.raises(nbe.ClusterStoppedError, match="job-1 cannot be waited for here"):
                    wait()
                refusals += 1
        finally:
            os._exit(refusals)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2


def test_the_end_of_a_forked_child_closes_no_cluster():
    """The child may end while the kernel replaces a dead driver: to close the cluster then would kill its workers."""
    closed = []
    cluster = SimpleNamespace(name="digits", close=lambda: closed.append("digits"))
    kernel_end.close_at_kernel_end(cluster)
    pid = os.fork()
    if pid == 0:
        kernel_end._close_all()
        os._exit(len(closed))
    kernel_end.do_not_close_at_kernel_end(cluster)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


ORPHAN = """
import os, signal, sys
from nbelastic.protocol.run_folder import RunFolder
run_folder = RunFolder("orphaned")
run_folder.acquire()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    signal.pause()
signal.pause()
"""


def test_an_orphaned_child_of_a_killed_kernel_does_not_keep_its_cluster(clusters_folder):
    """The lock is released with the process that took it, although a forked child still runs."""
    kernel = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE)
    child = int(kernel.stdout.readline())
    try:
        with pytest.raises(nbe.UsageError, match=f"running already \\(process {kernel.pid}\\)"):
            RunFolder("orphaned").acquire()
        kernel.kill()
        kernel.wait()
        run_folder = RunFolder("orphaned")
        run_folder.acquire()
        run_folder.release()
    finally:
        os.kill(child, signal.SIGKILL)
        kernel.stdout.close()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "digits.lock", "x" * 101])
def test_invalid_names_are_refused(clusters_folder, name):
    """A name that cannot be a file's, or would be the lock of another cluster, is refused."""
    with pytest.raises(nbe.UsageError, match="is not a valid name for a cluster: use up to 100 letters"):
        RunFolder(name)


@pytest.mark.parametrize("name", ["logs", "run-1", "new-1", "runs"])
def test_a_name_affects_no_other_folder(start_hostless, clusters_folder, name):
    """No name of a cluster affects the logs of other clusters or the folders of running processes."""
    logs = user_folder() / "logs" / "another-cluster"
    logs.mkdir(parents=True)
    cluster = start_hostless(name)
    with process_folder() as held:
        assert RunFolder(cluster.name).path.exists()
        cluster.stop()
        assert held.exists()
    assert logs.exists()


class AnotherMachine:
    """This process poses as one of another machine, which knows none of the processes here."""

    def __init__(self, monkeypatch, name):
        self.monkeypatch, self.name = monkeypatch, name

    def __enter__(self):
        self.patch = self.monkeypatch.context()
        patch = self.patch.__enter__()
        patch.setattr(local_clusters, "machine", lambda: f"{self.name} pid:[1]")
        patch.setattr(local_clusters, "is_alive", lambda _: False)
        patch.setattr(run_folder, "is_alive", lambda _: False)
        patch.setattr(run_folder.fcntl, "flock", lambda *_: None)  # a file system that does not share locks

    def __exit__(self, *error):
        self.patch.__exit__(*error)


def test_machines_that_share_a_temporary_folder_leave_each_others_clusters(
    start_hostless, clusters_folder, monkeypatch
):
    """Another machine lists the cluster, and neither removes its files, takes its name, nor attaches to it."""
    cluster = start_hostless("digits", keep=True)
    folder = RunFolder(cluster.name)
    files = lambda: {path: path.read_bytes() for path in (folder.lock, folder.path / local_clusters.SNAPSHOT_FILE)}
    before = files()
    with AnotherMachine(monkeypatch, "login2"):
        (info,) = local_clusters.clusters()
        here = os.uname().nodename
        assert info.problem == f"the cluster 'digits' belongs to the machine {here}: attach there."
        local_clusters.remove_dead_cluster("digits")
        with pytest.raises(nbe.UsageError, match=f"a cluster of the machine {here} is named 'digits'"):
            local_clusters.claim_name(RunFolder("digits"), "00000002")
        with pytest.raises(nbe.UsageError, match=f"belongs to the machine {here}: attach there"):
            nbe.Cluster.attach("digits")
    assert files() == before
    assert local_clusters.clusters()[0].problem == ""
    cluster.stop()
    assert not folder.path.exists()


@pytest.mark.parametrize("snapshot", [None, b"", b"{"])
def test_a_driver_that_was_killed_at_its_start_leaves_no_cluster(clusters_folder, snapshot):
    """Its lock is removed when the clusters are listed, and its name is free. A damaged snapshot is listed as such."""
    folder = RunFolder("digits")
    folder.lock.write_text("1@1 00000001")
    if snapshot is not None:
        folder.path.mkdir()
        (folder.path / local_clusters.SNAPSHOT_FILE).write_bytes(snapshot)
    assert [info.name for info in local_clusters.clusters()] == ([] if snapshot is None else ["digits"])
    if snapshot is None:
        assert not folder.lock.exists()
        local_clusters.claim_name(folder, "00000002")
        folder.release()


def test_a_name_is_free_although_its_folder_stays(clusters_folder, monkeypatch):
    """NFS keeps a removed file, and so its folder, as long as a kernel has the file mapped, such as a result."""
    folder = RunFolder("digits")
    local_clusters.claim_name(folder, "00000001")
    with monkeypatch.context() as on_nfs:
        on_nfs.setattr("shutil.rmtree", lambda *_, **__: None)
        folder.release()
        assert folder.path.exists()
        local_clusters.claim_name(folder, "00000002")
    assert folder.is_current
    folder.release()


def test_a_stopped_driver_blocks_no_client_however_many_have_asked(clusters_folder):
    """A command that is run every minute leaves one connection each time, which a stopped driver does not accept."""
    folder = RunFolder("digits")
    local_clusters.claim_name(folder, "00000001")
    with ExitStack() as at_end:
        at_end.callback(folder.release)
        listener = at_end.enter_context(bind_in(folder.path, client_messages.SOCKET))
        listener.listen(0)  # one connection waits, and not a hundred
        at_end.enter_context(connect_in(folder.path, client_messages.SOCKET))
        with pytest.raises(nbe.UsageError, match=rf"does not answer \(process {os.getpid()}\)"):
            connect_to_driver(folder.path, timeout=0.05)


def test_a_file_that_is_no_clusters_lock_is_passed_over(clusters_folder):
    """Another program's file does not keep a user from listing the clusters, and stays."""
    strange = RunFolder("digits").lock.with_name("a b.lock")
    strange.touch()
    assert local_clusters.clusters() == []
    assert strange.exists()


def test_a_dead_cluster_of_a_user_without_a_home_is_removed(clusters_folder, monkeypatch):
    """In a container, a user may have neither `HOME` nor an entry in the list of users."""
    folder = RunFolder("digits")
    folder.lock.write_text("1@1 00000001")
    folder.make()
    head = {"version": "1", "wire": "", "name": "digits", "number": "00000001"}
    (folder.path / local_clusters.SNAPSHOT_FILE).write_text(json.dumps(head))
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert local_clusters.clusters() == []
    assert not folder.path.exists()


def test_clusters_of_two_machines_share_a_name_and_a_home(start_hostless, clusters_folder, tmp_path, monkeypatch):
    """Clusters of two machines with one home have separate folders for batch jobs, which an attach keeps."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    numbers = ["00000001", "00000002"]
    monkeypatch.setattr(secrets, "token_hex", lambda _, left=iter(numbers): next(left))
    first = start_hostless(keep=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "logs"))
    second = start_hostless()
    folders = [batch_folder("quiet", number) for number in numbers]
    for folder in folders:
        folder.mkdir(parents=True)
    second.stop()
    assert [folder.exists() for folder in folders] == [True, False]
    monkeypatch.setattr("tempfile.tempdir", str(clusters_folder))
    first.detach()
    with nbe.Cluster.attach("quiet", discovery=NoHosts()):
        assert folders[0].exists()
    assert not folders[0].exists()
