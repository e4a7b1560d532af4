"""A kernel dies, with its driver or without, and its kept cluster trains on: the next kernel attaches, or the lease
ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import nbelastic as nbe
from nbelastic.client import connection
from nbelastic.protocol.local_clusters import SNAPSHOT_FILE, fingerprint
from nbelastic.system.folder_paths import runs_folder
from nbelastic.system.process_identity import identity
from tests.process import programs
from tests.process.kernel_process import AttachedScript, Kernel, attached, start_kernels
from tests.process.script_training import MANY_STEPS, TRAIN, join_options, torchrun
from tests.process.training import in_one_generation
from tests.support.processes import alive
from tests.support.waiting import until, until_none

WORLD = 3


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    with start_kernels("kept", tmp_path, 10) as start:
        yield start


def test_a_killed_driver_costs_no_step(kept):
    """While no driver runs the world makes steps; the next driver takes it over with its job and history."""
    kernel = kept()
    generation = kernel.wait_for_steps(WORLD)
    kernel.kill_with_driver()
    made = len(kernel.steps())
    until(lambda: len(kernel.steps()) > made + 30, what="steps without a driver")
    before = set(kernel.processes())
    training = attached(kernel)
    members = training.wait_for_world(WORLD)
    assert training.job.name == "job-1"
    assert training.cluster.status().generation == generation
    assert set(kernel.processes()) == before
    texts = [event.text for event in training.cluster.events]
    assert "job-1 was submitted" in texts
    assert f"{WORLD} workers train on in generation {generation}" in texts
    training.signal_worker(members[0])  # the new driver replaces lost workers, too
    training.wait_for_world(WORLD)
    results = training.finish()
    assert len(results) == WORLD
    training.cluster.stop()


@pytest.mark.parametrize(
    ("part", "first"),
    [
        ("worker", "kernel"),
        pytest.param("agent", "part", marks=pytest.mark.soak(share=0.2)),
        pytest.param("template", "kernel", marks=pytest.mark.soak(share=0.2)),
        pytest.param("controller", "part", marks=pytest.mark.soak(share=0.2)),
        pytest.param("worker", "part", marks=pytest.mark.soak(seconds=15)),
        pytest.param("agent", "kernel", marks=pytest.mark.soak(seconds=15)),
        pytest.param("template", "part", marks=pytest.mark.soak(seconds=15)),
        pytest.param("controller", "kernel", marks=pytest.mark.soak(seconds=15)),
    ],
)
def test_a_kernel_and_another_part_die(kept, part, first):
    """When a kernel and another process die, in either order, the next driver replaces the lost process."""
    kernel = kept(hosts="localhost:2,127.0.0.2:1", engines=part == "controller")
    kernel.wait_for_steps(WORLD)
    victim = kernel.pid_of(part)
    if first == "kernel":
        kernel.kill_with_driver()
        os.kill(victim, signal.SIGKILL)
    elif first == "part":
        os.kill(victim, signal.SIGKILL)
        kernel.kill_with_driver()
    until(lambda: not alive(victim), what=f"the {part} to end")
    training = attached(kernel)
    training.wait_for_world(WORLD)
    assert len(training.finish()) == WORLD
    training.cluster.stop()


@pytest.fixture
def kernel_is_killed(kept: Callable[..., Kernel], tmp_path: Path) -> Callable[..., None]:
    """Kill the kernel of a training, optionally its driver and rank 0, and check the checkpoint at the lease's end."""

    def story(with_driver: bool, with_rank_0: bool = False) -> None:
        folder = tmp_path / "checkpoints"
        kernel = kept(lease=5.0, silence=3.0, arguments={"checkpoint": str(folder), "checkpoint_every": 1_000_000})
        kernel.wait_for_steps(WORLD)
        kernel.kill_with_driver() if with_driver else kernel.kill()
        if with_rank_0:
            os.kill(next(line["pid"] for line in kernel.steps() if line["rank"] == 0), signal.SIGKILL)
        until_none(kernel.leftovers, 60 if with_rank_0 else 40)
        last = max(line["step"] for line in kernel.steps())
        newest = max(
            path.name for path in folder.iterdir()
        )  # each worker ends by its own clock, and may save its commit
        assert int(newest.rpartition("-")[2]) in range(last - 1, last + 1)

    return story


@pytest.mark.parametrize("with_driver", [False, pytest.param(True, marks=pytest.mark.soak(seconds=10))])
def test_a_cluster_without_a_kernel_ends_with_its_lease(kernel_is_killed, with_driver):
    """Without a kernel a cluster saves a last checkpoint, ends within its lease, and leaves no process or file."""
    kernel_is_killed(with_driver)


@pytest.mark.cold  # an agent kills the processes of the cluster but its own, which the driver must know by its pid
@pytest.mark.parametrize("with_driver", [False, pytest.param(True, marks=pytest.mark.soak(seconds=9))])
def test_nothing_is_left_of_a_cluster_that_is_not_kept(kept, with_driver):
    """A cluster that is not kept ends at once with its kernel, whether or not its driver still runs."""
    kernel = kept(keep=False)
    kernel.wait_for_steps(WORLD)
    kernel.kill_with_driver() if with_driver else kernel.kill()
    until_none(kernel.leftovers, 15)


@pytest.mark.soak(share=0.2)
def test_a_client_that_starts_the_next_driver_does_not_own_the_cluster(kept):
    """A terminal that starts the next driver while the kernel is stopped does not become the owner of the cluster."""
    kernel = kept(keep=False)
    generation = kernel.wait_for_steps(WORLD)
    os.kill(kernel.process.pid, signal.SIGSTOP)
    os.kill(kernel.driver, signal.SIGKILL)
    until(lambda: not kernel.driver, what="the driver to end")
    shown = subprocess.run(
        [sys.executable, "-m", "nbelastic", "status", kernel.name],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert f"{WORLD} workers train" in shown.stdout
    made = len(kernel.steps())
    until(lambda: len(kernel.steps()) > made + 30, what="steps without any client that runs")
    assert {line["generation"] for line in kernel.steps()[made:]} == {generation}
    os.kill(kernel.process.pid, signal.SIGCONT)
    kernel.kill()
    until_none(kernel.leftovers, 15)


def test_a_kernel_that_exits_normally(kept):
    """A kernel that exits normally leaves its kept cluster as a killed one does."""
    kernel = kept()
    generation = kernel.wait_for_steps(WORLD)
    driver = kernel.driver
    kernel.end()
    training = attached(kernel)
    training.wait_for_world(WORLD)
    assert (training.cluster.status().generation, kernel.driver) == (generation, driver)
    training.finish()
    training.cluster.stop()


@pytest.mark.parametrize("part", ["worker", "agent", pytest.param("controller", marks=pytest.mark.soak(seconds=6))])
def test_lost_processes_are_replaced_without_a_kernel(kept, part):
    """The driver replaces lost processes without a kernel; the next kernel finds a full world and the events."""
    kernel = kept(hosts="localhost:2,127.0.0.2:1", engines=part == "controller")
    generation = kernel.wait_for_steps(WORLD)
    victim = kernel.pid_of(part)
    kernel.kill()
    os.kill(victim, signal.SIGKILL)
    if part != "controller":
        until(lambda: kernel.wait_for_steps(WORLD) > generation, 60, "a world as large as before")
    training = attached(kernel)
    training.wait_for_world(WORLD)
    kind = {"worker": "worker-lost", "agent": "host-lost", "controller": "controller-started"}[part]
    until(lambda: kind in [event.kind for event in training.cluster.events], what=kind)
    assert "driver-came" not in [event.kind for event in training.cluster.events]
    assert len(training.finish()) == WORLD
    training.cluster.stop()


def test_several_kernels_share_one_cluster(kept):
    """All kernels of a cluster get its events, output and results; a kernel that detaches does not disturb the others."""
    kernel = kept()
    generation = kernel.wait_for_steps(WORLD)
    one, two = attached(kernel), attached(kernel)
    with in_one_generation(one):
        one.cluster.scale(max=7, by="one")
        two.cluster.scale(max=5, by="two")
        until(
            lambda: [each.cluster.status().max for each in (one, two)] == [5, 5], what="both to show the last request"
        )
        texts = [event.text for event in one.cluster.events if event.kind == "scaled"]
        assert ["one" in texts[-2], "two" in texts[-1]] == [True, True]
        until(lambda: one.cluster.events == two.cluster.events, what="the same events")
        one.cluster.detach()
        with pytest.raises(nbe.ClusterStoppedError, match="was detached: attach to it again"):
            one.cluster.scale(max=9)
        assert one.job.status == "detached"
        assert two.cluster.status().generation == generation
        one = attached(kernel)
    results = two.finish()
    assert one.job.result(timeout=20) == results
    assert "is the sum" not in one.job.logs() or one.job.logs() == two.job.logs()
    two.cluster.stop()
    until(lambda: one.cluster.status().phase == "finished", what="the other to show the end")
    with pytest.raises(nbe.ClusterStoppedError, match="stopped by hand"):
        one.cluster.run(print)


@pytest.mark.soak(share=0.2)
def test_a_new_driver_restarts_a_script(kept):
    """A new driver restarts a script from its checkpoint; a terminal's torchrun takes part, though it has no restart left."""
    kernel = kept(program="script", hosts="localhost:2", arguments={"max_restarts": 0})
    until(lambda: len({line["pid"] for line in kernel.steps()}) == 2, 30, "steps")
    kernel.kill_with_driver()
    cluster = nbe.Cluster.attach(kernel.name)
    training = AttachedScript(cluster, cluster.job, kernel.folder)
    training.wait_for_world(2)
    assert "job-1 begins again" in " ".join(event.text for event in cluster.events)
    options = join_options(cluster.connection_file(), "--max-restarts=0")
    with torchrun(*options, TRAIN, kernel.folder, MANY_STEPS) as external:
        training.wait_for_world(3)
        assert list(kernel.snapshot.job.external.values()) == [identity(external.pid)], "the next driver waits for it"
        kernel.kill_with_driver()
        cluster = nbe.Cluster.attach(kernel.name)
        training = AttachedScript(cluster, cluster.job, kernel.folder)
        training.wait_for_world(3)
        training.finish()
        assert external.wait(20) == 0
    cluster.stop()


def test_a_script_that_ends_without_a_driver(kept):
    """The agents keep the end of a script, so a new driver does not start it again."""
    kernel = kept(program="script", hosts="localhost:2")
    pids = until(lambda: {line["pid"] for line in kernel.steps() if line["world"] == 2}, 30, "steps")
    template = psutil.Process(next(iter(pids))).parent()
    kernel.kill_with_driver()
    (kernel.folder / "finish").touch()
    until(lambda: len(template.children()) == 2, what="the script and its node to end; the engines stay")
    cluster = nbe.Cluster.attach(kernel.name)
    assert cluster.job.result(timeout=10) == []
    assert "begins again" not in " ".join(event.text for event in cluster.events)
    cluster.stop()


@pytest.mark.soak(seconds=12)
def test_a_survivor_saves_when_rank_0_and_the_kernel_are_lost(kernel_is_killed):
    """When rank 0 is lost and no kernel comes, a survivor writes the last checkpoint."""
    kernel_is_killed(with_driver=True, with_rank_0=True)


@pytest.mark.parametrize("with_driver", [False, True])
def test_a_job_that_ends_without_a_kernel(kept, with_driver):
    """A job that ends without a kernel keeps its results and output for the next kernel, and for the one after."""
    kernel = kept(program="print_rank", min=WORLD)
    kernel.kill_with_driver() if with_driver else kernel.kill()
    cluster = nbe.Cluster.attach(kernel.name)
    assert cluster.job.result(timeout=20) == ["rank 0", "rank 1", "rank 2"]
    cluster.detach()
    if with_driver:
        kernel.kill_with_driver()
    cluster = nbe.Cluster.attach(kernel.name)
    assert cluster.job.result(timeout=20) == ["rank 0", "rank 1", "rank 2"]
    until(lambda: "I am rank 1" in cluster.job.logs(), what="the output of rank 1")
    training = cluster.run(programs.print_rank, str(kernel.folder))
    assert training.name == "job-2"
    assert len(training.result(timeout=20)) == WORLD
    cluster.stop()


def test_an_error_without_a_kernel(kept):
    """A user's error without a kernel is the error of the job, with its traceback."""
    kernel = kept(program="fail_later", min=WORLD)
    until((kernel.folder / "begun").exists, what="the world")
    kernel.kill_with_driver()
    (kernel.folder / "go").touch()
    until((kernel.folder / "failed").exists, what="the error")
    cluster = nbe.Cluster.attach(kernel.name)
    with pytest.raises(nbe.JobError, match="no such luck") as caught:
        cluster.job.result(timeout=20)
    assert caught.value.rank == 1
    assert "fail_later" in caught.value.remote_traceback
    cluster.stop()


@pytest.mark.soak(seconds=8)
def test_a_rank_that_holds_the_interpreter_lock_while_a_kernel_attaches(kept):
    """A rank that holds the interpreter lock while a new driver starts is not killed, and trains on afterwards."""
    kernel = kept(program="train_and_hold_lock", hosts="localhost:2", silence=1.0)
    generation = kernel.wait_for_steps(2)
    kernel.kill_with_driver()
    (kernel.folder / "hold").touch()
    until((kernel.folder / "held").exists, what="a rank to hold the lock")
    training = attached(kernel)
    kinds = lambda: [event.kind for event in training.cluster.events]
    until(lambda: "worker-silent" in kinds(), what="the unresponsive rank to be reported")
    programs.release_lock(kernel.folder)
    steps = len(kernel.steps())
    until(lambda: len(kernel.steps()) > steps + 30, what="steps after it")
    training.wait_for_world(2)
    assert not {"host-lost", "worker-lost", "world-broken"}.intersection(kinds()), list(training.cluster.events)
    assert training.cluster.status().generation == generation, list(training.cluster.events)
    training.finish()


def test_a_discovery_that_fails_while_a_new_kernel_attaches(kept, tmp_path):
    """When the discovery of a new kernel fails, the hosts stay, the training goes on, and the discovery is asked again."""
    busy, script = tmp_path / "busy", tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\nrm {busy} 2>&- && echo 'the controller is busy' >&2 && exit 1\necho localhost:2\n")
    script.chmod(0o755)
    kernel = kept(hosts=None, discovery=str(script))
    generation = kernel.wait_for_steps(2)
    kernel.kill_with_driver()
    until(
        lambda: not any(str(script) in command for command in kernel.processes().values()),
        what="the last discovery to end",
    )
    busy.touch()
    training = attached(kernel)
    kinds = lambda: [event.kind for event in training.cluster.events if "discovery" in event.kind]
    until(lambda: kinds() == ["discovery-failed", "discovery-recovered"], what="the discovery to answer again")
    training.wait_for_world(2)
    assert training.cluster.status().generation == generation
    training.finish()


def test_setup_cells_run_once(kept):
    """A setup cell of an earlier kernel runs once on each worker, also on workers that the next driver starts."""
    kernel = kept(program="")
    kernel.kill_with_driver()
    cluster = nbe.Cluster.attach(kernel.name)
    cluster.execute("counted = globals().get('counted', 0) + 1", setup=True)
    kernel.kill_with_driver()
    cluster = nbe.Cluster.attach(kernel.name)
    victim = cluster.workers[0].id
    cluster.restart(victim)
    until(lambda: victim not in [w.id for w in cluster.workers])
    until(lambda: [w.state for w in cluster.workers] == ["ready"] * WORLD)
    assert [out for _, out, _, _ in cluster.execute("print(counted)")] == ["1\n"] * WORLD
    cluster.stop()


@pytest.mark.soak(share=0.2)
def test_a_driver_that_does_not_answer(kept, monkeypatch):
    """A stopped driver keeps its cluster; a client that wants to attach gets the pid to end."""
    monkeypatch.setattr(connection, "GREETING_TIMEOUT", 1.0)
    kernel = kept(program="")
    driver = kernel.driver
    os.kill(driver, signal.SIGSTOP)
    until(lambda: psutil.Process(driver).status() == psutil.STATUS_STOPPED)
    with pytest.raises(nbe.UsageError, match=rf"process {driver}.*end that process"):
        nbe.Cluster.attach(kernel.name)
    kernel.kill_with_driver()
    nbe.Cluster.attach(kernel.name).stop()


def test_unusable_files_of_a_cluster(kept, tmp_path):
    """`attach` raises one line that names the fault of an unusable file; the cluster goes on."""
    kernel = kept(program="")
    kernel.kill_with_driver()
    path = runs_folder() / kernel.name / SNAPSHOT_FILE
    whole = path.read_bytes()
    for broken, text in (
        (whole[: len(whole) // 2], "is damaged"),
        (b"", "is damaged"),
        (whole.replace(f'"wire":"{fingerprint()}"'.encode(), b'"wire":"0"'), "was started by nbelastic"),
    ):
        path.write_bytes(broken)
        with pytest.raises(nbe.UsageError, match=text):
            nbe.Cluster.attach(kernel.name)
    path.write_bytes(whole)
    path.chmod(0o644)
    with pytest.raises(nbe.UsageError, match="chmod 600"):
        nbe.Cluster.attach(kernel.name)
    path.chmod(0o600)
    with pytest.raises(nbe.UsageError, match="attach to it"):
        nbe.Cluster("localhost:1", name=kernel.name).start()
    with pytest.raises(nbe.UsageError, match="no cluster 'nobody'"):
        nbe.Cluster.attach("nobody")
    nbe.Cluster.attach(kernel.name).stop()
