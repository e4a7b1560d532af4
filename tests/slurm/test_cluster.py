"""A cluster whose hosts are Slurm jobs."""

import pytest

import nbelastic as nbe
from tests.process.observing import Training, until
from tests.process.programs import train


@pytest.fixture
def training(slurm, tmp_path, monkeypatch):
    """On the hosts `one` with two slots and `two` with one, each of which is a job."""
    monkeypatch.setenv("HOME", str(tmp_path))
    cluster = nbe.Cluster("one:2,two:1", launcher="slurm", silence=3, cooldown=(0, 0), log_dir=tmp_path / "logs")
    try:
        yield Training(cluster.start(timeout=60), tmp_path / "steps", train)
    finally:
        cluster.stop()
    until(lambda: not slurm.jobs(), what="all jobs to end")
    assert [path.name for path in (tmp_path / ".nbelastic").rglob("*") if path.suffix in (".json", ".sh")] == []


def jobs(slurm):
    """Numbers by name."""
    return dict(line.split() for line in slurm("squeue", "-h", "-o", "%j %i").splitlines())


def test_training_on_hosts_that_are_jobs(slurm, training):
    """Two hosts are two jobs, named after them; at the end no job is left, and no key."""
    training.runs(3)
    assert set(jobs(slurm)) == {"nbelastic-one", "nbelastic-two"}
    training.finish()


def test_a_cancelled_job_is_a_lost_host(slurm, training):
    """The training goes on with the other one."""
    training.runs(3)
    slurm("scancel", jobs(slurm)["nbelastic-two"])
    training.runs(2)
    training.finish()
