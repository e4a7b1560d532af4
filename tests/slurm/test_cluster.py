"""A cluster whose hosts are Slurm jobs."""

import os

import psutil
import pytest

import nbelastic as nbe
from tests.process.kernel_process import PAUSE, Kernel, attached, end
from tests.process.programs import train
from tests.process.script_training import ScriptTraining
from tests.process.training import Training
from tests.support.waiting import files_in, until


@pytest.fixture
def training(slurm, tmp_path, monkeypatch):
    """A cluster with the hosts `one` (two slots) and `two` (one slot), each of which is a job."""
    monkeypatch.setenv("HOME", str(tmp_path))
    cluster = nbe.Cluster("one:2,two:1", launcher="slurm", silence=3, cooldown=(0, 0), log_dir=tmp_path / "logs")
    try:
        yield Training(cluster.start(timeout=60), tmp_path / "steps", train)
    finally:
        cluster.stop()
    secret_files = lambda: [path for path in files_in(tmp_path / ".nbelastic") if path.suffix in (".json", ".sh")]
    until(lambda: not slurm.jobs() and not secret_files(), what="all jobs to end, and their keys to be removed")


def jobs(slurm):
    """The numbers of jobs by name."""
    return dict(line.split() for line in slurm("squeue", "-h", "-o", "%j %i").splitlines())


@pytest.mark.cold  # here agents start in jobs as those of users do
def test_training_on_hosts_that_are_jobs(slurm, training):
    """Each host is a job that is named after it. At the end no job and no key file is left."""
    training.wait_for_world(3)
    assert set(jobs(slurm)) == {"nbelastic-one", "nbelastic-two"}
    training.finish()


@pytest.mark.soak(share=0.2)
def test_a_cancelled_job_is_a_lost_host(slurm, training):
    """The training goes on with the other host."""
    training.wait_for_world(3)
    slurm("scancel", jobs(slurm)["nbelastic-two"])
    training.wait_for_world(2)
    training.finish()


@pytest.mark.soak(seconds=10)
def test_another_job_takes_the_place_of_one_that_is_announced_to_end(slurm, training):
    """Slurm sends SIGUSR1 to the agent alone, as it does before a time limit: nothing is lost, and a new job joins."""
    training.wait_for_world(3)
    slurm("scancel", "--batch", "--signal=USR1", jobs(slurm)["nbelastic-two"])
    until(lambda: set(jobs(slurm)) == {"nbelastic-one", "nbelastic-two.2"})
    until(lambda: {worker.host for worker in training.wait_for_world(3)} == {"one", "two.2"})
    training.finish()
    assert not {"world-broken", "host-lost"} & {event.kind for event in training.cluster.events}


@pytest.mark.soak(seconds=20)
def test_another_job_takes_the_place_of_one_whose_node_is_drained(slurm, training):
    """The job may run to its end, so its host trains on until the next job has a node. Nothing is lost."""
    training.wait_for_world(3)
    nodes = dict(line.split() for line in slurm("squeue", "-h", "-o", "%j %N").splitlines())
    drained = nodes["nbelastic-two"]
    slurm("scontrol", "update", f"nodename={drained}", "state=drain", "reason=test")
    expected = {name + (".2" if nodes[f"nbelastic-{name}"] == drained else "") for name in ("one", "two")}
    until(lambda: {worker.host for worker in training.wait_for_world(3)} == expected)
    training.finish()
    added = [event.text for event in training.events("host-added")]
    assert any(
        text.startswith(f"two.2 with 1 slot in place of two, by the drain of its node {drained}") for text in added
    )
    assert not {"world-broken", "host-lost"} & {event.kind for event in training.cluster.events}


@pytest.fixture
def start_kept(slurm, tmp_path, monkeypatch):
    """A kernel with a kept cluster whose hosts are jobs, each on its own node. At the end nothing of it is left."""
    monkeypatch.setenv("HOME", str(tmp_path))
    options = {"launcher": "slurm", "launcher_options": {"options": "--exclusive"}, "silence": 3.0}
    options["arguments"] = {"pause": PAUSE}
    started = []

    def start(hosts):
        started.append(Kernel(f"jobs-{os.getpid()}", tmp_path / "steps", hosts, **options))
        return started[-1].ready()

    yield start
    for kernel in started:
        end(kernel)
        until(lambda kernel=kernel: not kernel.processes(), what="all its processes to end")
    until(lambda: not slurm.jobs(), what="all jobs to end")
    assert list((tmp_path / ".nbelastic").iterdir()) == []


@pytest.mark.soak(seconds=9)
def test_jobs_outlive_a_kernel(slurm, start_kept):
    """The next kernel has the same jobs and the same generation. A removed host's job ends."""
    kernel = start_kept("one:1,two:1")
    generation = kernel.wait_for_steps(2)
    before = jobs(slurm)
    until(
        lambda: all(agent.job for agent in kernel.snapshot.agents.values()),
        what="the jobs to be in the driver snapshot",
    )
    kernel.kill()
    training = attached(kernel)
    training.wait_for_world(2)
    assert jobs(slurm) == before
    assert training.cluster.status().generation == generation
    training.cluster.remove_host("two")
    until(lambda: set(jobs(slurm)) == {"nbelastic-one"}, what="the job to end")
    training.finish()


@pytest.mark.soak(seconds=14)
def test_a_queued_job_outlives_a_kernel(slurm, start_kept):
    """It keeps its place in the queue, which the status names, and joins when it starts. At the end a queued one is cancelled."""
    slurm("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    kernel = start_kept("one:1,two:1")
    kernel.wait_for_steps(1)
    until(
        lambda: kernel.snapshot.agents.keys() == {"one", "two"} and all(a.job for a in kernel.snapshot.agents.values())
    )
    before = jobs(slurm)
    assert len(before) == 2
    kernel.kill()
    training = attached(kernel)
    training.wait_for_world(1)
    assert jobs(slurm) == before
    reasons = lambda: {host.name: host.reason for host in training.cluster.hosts}
    waiting = lambda: [name for name, reason in reasons().items() if reason.startswith("queued (")]
    (queued,) = until(waiting, what=reasons)  # either of the two: both are submitted at the same time
    slurm("scontrol", "update", "nodename=n2", "state=resume")
    training.wait_for_world(2)
    assert reasons()[queued] == ""
    assert jobs(slurm) == before
    training.cluster.add_host("three:1")
    until(lambda: "nbelastic-three" in jobs(slurm))
    until(lambda: "three" in kernel.snapshot.agents and kernel.snapshot.agents["three"].job)
    training.cluster.detach()
    training = attached(kernel)
    assert "nbelastic-three" in jobs(slurm)
    training.finish()
    training.cluster.stop()
    until(lambda: not slurm.jobs(), what="the queued job to be cancelled")


def kill_all_processes(slurm, host):
    """As if the node of this host's job had no memory left."""
    step = f"slurmstepd: [{jobs(slurm)[f'nbelastic-{host}']}.batch]"
    (daemon,) = (each for each in psutil.process_iter(["cmdline"]) if step in " ".join(each.info["cmdline"] or ()))
    for process in daemon.children(recursive=True):
        process.kill()


@pytest.mark.soak(share=0.2)
def test_a_host_whose_processes_are_all_killed_is_lost_at_once(slurm, training):
    """Its connections have ended, so the driver does not wait for a silence."""
    training.wait_for_world(3)
    kill_all_processes(slurm, "two")
    training.wait_for_world(2)
    training.finish()
    lost = [event.text for event in training.events("host-lost")]
    assert ["the connection of two has ended" in text for text in lost] == [True]


@pytest.mark.soak(seconds=20)
def test_a_script_goes_on_when_all_processes_of_a_job_are_killed(slurm, tmp_path, monkeypatch):
    """The other rank's connection breaks before the host is known to be lost. That is not the script's failure."""
    monkeypatch.setenv("HOME", str(tmp_path))
    options = {"min": 1, "silence": 3, "cooldown": (0, 0), "log_dir": tmp_path / "logs"}
    with nbe.Cluster("one:1,two:1", launcher="slurm", **options) as cluster:
        training = ScriptTraining(cluster, tmp_path / "steps")
        training.wait_for_world(2)
        kill_all_processes(slurm, "two")
        assert [worker.host for worker in training.wait_for_world(1)] == ["one"]
        training.finish()
    until(lambda: not slurm.jobs(), what="all jobs to end")
