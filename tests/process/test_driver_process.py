"""The driver is its own process: what happens to a cluster when its kernel is busy, stopped, signalled or dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import nbelastic as nbe
from tests.process import programs
from tests.process.training import lines_in
from tests.support.processes import driver_pid, leftovers, run_folder
from tests.support.waiting import until, until_none

BUSY = """\
import ctypes, os, signal, sys, time
import nbelastic as nbe
from tests.process import programs

if __name__ == "__main__":
    with nbe.Cluster("localhost:3", min=2, cooldown=(0, 0), log_dir=f"{sys.argv[1]}/logs") as cluster:
        job = cluster.run(programs.train, sys.argv[1])
        cluster.wait(3, timeout=60)
        while cluster.status().step < 20:
            time.sleep(0.02)
        victim = cluster.workers[0].pid
        os.kill(victim, signal.SIGKILL)
        print(victim, flush=True)
        os.mkfifo(f"{sys.argv[1]}/held")
        ctypes.PyDLL(None).open(f"{sys.argv[1]}/held".encode(), os.O_RDONLY)  # blocks until the test opens it, with the lock held
        open(f"{sys.argv[1]}/finish", "w")
        print(len(job.result(timeout=30)), flush=True)
"""


def test_a_kernel_that_holds_the_interpreter_lock_delays_no_recovery(tmp_path: Path) -> None:
    """A lost worker is replaced, and the world recovers, while a cell of the kernel holds the interpreter lock."""

    def is_whole_without(victim: int) -> bool:
        steps = [line for line in lines_in(tmp_path) if "step" in line]
        last = max(line["generation"] for line in steps if line["pid"] == victim)
        return any(line["generation"] > last and line["world"] == 3 for line in steps)

    with subprocess.Popen([sys.executable, "-c", BUSY, str(tmp_path)], stdout=subprocess.PIPE, text=True) as kernel:
        try:
            assert kernel.stdout is not None
            victim = int(kernel.stdout.readline())
            until((tmp_path / "held").exists)
            until(lambda: is_whole_without(victim), what="the world to be whole again")
            assert kernel.poll() is None
            programs.release_lock(tmp_path)
            assert kernel.communicate(timeout=60)[0] == "3\n"
        finally:
            kernel.kill()


def test_signals_to_the_kernel_do_not_reach_its_driver(make, tmp_path):
    """Signals to the kernel's process group or session do not reach the driver: it is in neither."""
    cluster = make("localhost:1", min=1)
    driver = driver_pid(cluster)
    assert driver != os.getpid()
    assert os.getpgid(driver) == os.getsid(driver) == driver
    os.kill(driver, signal.SIGINT)
    assert cluster.run(os.getpid).result(timeout=20) == [cluster.workers[0].pid]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.soak(share=0.2)
def test_a_driver_that_is_stopped_does_not_hold_up_a_stop(make, monkeypatch, keep):
    """A stopped driver is killed after its timeout, and the next one ends all that it has started."""
    monkeypatch.setattr("nbelastic.client.stopping.CLOSING_TIMEOUT", 3.0)
    cluster = make("localhost:2", min=2, keep=keep)
    pids = {worker.pid for worker in cluster.workers}
    driver = driver_pid(cluster)
    os.kill(driver, signal.SIGSTOP)
    until(lambda: psutil.Process(driver).status() == psutil.STATUS_STOPPED)
    cluster.stop(timeout=0.5)
    until_none(lambda: leftovers(pids), 15)


FORKED = """\
import os, signal, sys
import nbelastic as nbe

if __name__ == "__main__":
    with nbe.Cluster("localhost:1", log_dir=sys.argv[1]) as cluster:
        if os.fork() == 0:
            cluster.stop()  # must have no effect: the cluster belongs to the parent
            try:
                cluster.execute("1")
            except nbe.ClusterStoppedError as error:
                os._exit(0 if "was forked" in str(error) else 2)
            os._exit(3)
        _, status = os.wait()
        print(os.waitstatus_to_exitcode(status), cluster.run(os.getppid).result(timeout=20) != [], flush=True)
"""


def test_a_forked_kernel_has_no_cluster(tmp_path: Path) -> None:
    """A forked child of the kernel, as `multiprocessing` makes it, can neither stop the cluster nor keep it alive."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "0 True\n", done.stderr


def test_errors_of_the_driver_are_in_a_file(make):
    """Errors of the driver's process go to a file among the cluster's logs that only their owner can read."""
    cluster = make("localhost:1")
    log = cluster.log_dir / "driver.log"
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.read_text() == ""


@pytest.mark.parametrize("keep", [False, True])
def test_a_driver_that_dies_is_replaced_by_its_kernel(make, tmp_path, keep):
    """The kernel replaces a dead driver: the training goes on, and the cluster and job objects stay valid."""
    cluster = make("localhost:3", min=2, keep=keep)
    with nbe.Cluster.attach(cluster.name) as other:
        job = cluster.run_cell(f"from tests.process import programs; print('begun'); programs.train({str(tmp_path)!r})")
        generation = cluster.wait(3).generation
        until(lambda: job.logs().count("begun") == 3, what="output")
        dead = driver_pid(cluster)
        os.kill(dead, signal.SIGKILL)
        assert cluster.wait(3, timeout=30).generation == generation, "the next driver answers"
        assert job.logs().count("begun") == 3
        until(lambda: any("has taken over" in event.text for event in other.events))
        victim = cluster.workers[0].pid
        os.kill(victim, signal.SIGKILL)
        until(
            lambda: victim not in {worker.pid for worker in other.workers}, what="the next driver to replace a worker"
        )
        cluster.wait(3, timeout=30)
        (tmp_path / "finish").touch()
        assert len(job.result(timeout=30)) == len(other.job.result(timeout=10)) == 3
        assert driver_pid(cluster) == driver_pid(other) != dead
        other.detach()


@pytest.mark.soak(share=0.2)
def test_drivers_that_die_again_and_again_are_not_replaced_without_end(make):
    """After four deaths of drivers the client reports them and starts no other driver; other clients can attach."""
    cluster = make("localhost:1")
    engines = cluster.client[:]
    for number in range(2, 5):
        os.kill(driver_pid(cluster), signal.SIGKILL)
        until(lambda: f"driver {number} has taken over" in cluster.events[-1].text)
        assert engines.apply_sync(os.getpid) == [cluster.workers[0].pid]
    os.kill(driver_pid(cluster), signal.SIGKILL)
    until(lambda: cluster.status().phase == "finished")
    assert "has ended unexpectedly, 4 times in" in cluster.status().reason
    with nbe.Cluster.attach(cluster.name) as again:
        assert len(again.run(os.getpid).result(timeout=20)) == 1


@pytest.mark.parametrize(("keep", "soon"), [(False, True), (True, True), (True, False)])
def test_a_cluster_whose_driver_has_died_can_be_stopped(make, keep, soon):
    """A stop of a cluster without a driver starts one that ends it: no agent lives until the end of the lease."""
    cluster = make("localhost:2", min=2, keep=keep)
    pids = {worker.pid for worker in cluster.workers}
    os.kill(driver_pid(cluster), signal.SIGKILL)
    if not soon:
        until(lambda: "another driver takes over" in cluster.status().reason)
    cluster.stop()
    assert not run_folder(cluster).exists()
    until_none(lambda: leftovers(pids), 15)


def test_the_driver_uses_the_kernels_temporary_folder(make, monkeypatch, tmp_path):
    """The driver uses the kernel's temporary folder, also when the kernel has set `tempfile.tempdir`."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cluster = make("localhost:1")
    assert cluster.run(os.getpid).result(timeout=20) == [cluster.workers[0].pid]
    assert list(tmp_path.glob("nbelastic-*/runs/*/driver.sock"))
    cluster.stop()


def test_the_driver_imports_no_module_of_the_users_folder(tmp_path: Path) -> None:
    """The driver does not import an `asyncio.py` from the notebook's folder, though that is on the kernel's path."""
    (tmp_path / "asyncio.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "secrets.py").write_text("raise SystemExit('not this one')")
    code = "import asyncio, secrets, sys; import nbelastic as nbe\n"
    code += "nbe.Cluster\nsys.path.insert(0, '')\nsys.path.append(sys.argv[1])\n"
    code += "nbe.Cluster('localhost:1', log_dir=sys.argv[1]).start(wait=False).stop(); print('fine')"
    command = [sys.executable, "-P", "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "fine\n", done.stderr
