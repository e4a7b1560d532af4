"""The values and errors of a job's ranks, on their way to clients and after the job's end."""

from __future__ import annotations

import os

import pytest

import nbelastic as nbe
from nbelastic.driver.results import Outcome
from nbelastic.protocol import messages
from tests.driver.hostless_cluster import NoHosts
from tests.driver.raw_client import blob, end_job, in_driver
from tests.support import driver_thread
from tests.support.waiting import until


@pytest.mark.parametrize("where", ["message", "file"])
def test_a_result_outlives_its_cluster(start_hostless, where):
    """All clients have it, in a file or not, also when the cluster is stopped at that moment and its folder removed."""
    cluster = start_hostless()
    job = cluster.run(os.getpid)
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as other:
        path = cluster._link.run_folder.path / "results" / job.name / "value" if where == "file" else None
        end_job(cluster, job, Outcome(value=blob({"loss": 0.5}, path)))
        cluster.stop()
        assert not cluster._link.run_folder.path.exists()
        assert job.result(timeout=10) == other.job.result(timeout=10) == [{"loss": 0.5}]


def test_a_file_that_is_gone_is_an_error_of_the_job(start_hostless):
    """And not one of the thread that reads."""
    cluster = start_hostless()
    job = cluster.run(os.getpid)
    end_job(cluster, job, Outcome(value=messages.Blob(7, path=str(cluster._link.run_folder.path / "nowhere"))))
    with pytest.raises(nbe.JobError, match=r"succeeded, but its results cannot be read: .*No such file"):
        job.result(timeout=10)
    cluster.scale(2, 3)
    assert cluster.status().min == 2


def test_the_error_of_a_job_is_whole(start_hostless):
    """With its rank, its worker and the remote traceback; every client has one of its own."""
    cluster = start_hostless()
    job = cluster.run(os.getpid)
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as other:
        end_job(cluster, job, Outcome("ValueError: no", "the remote traceback"))
        for each in (job, other.job):
            with pytest.raises(nbe.JobError, match="job-1 failed: it failed") as caught:
                each.result(timeout=10)
            error = caught.value
            assert (error.rank, error.worker, error.remote_traceback) == (0, "a/0#1", "the remote traceback")


def test_who_hears_nothing_while_several_jobs_end_does_not_wait_for_ever(start_hostless):
    """A kernel that is stopped, while others run jobs: the driver keeps the last one alone, and says so of the others."""
    cluster = start_hostless()
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


def test_values_stay_until_everybody_has_them(start_hostless):
    """A kernel that is stopped while others run the next jobs finds the file of the one that it was told of."""
    cluster = start_hostless()
    there = lambda: in_driver(cluster, lambda driver: set(driver._clients._greeted))
    before = there()
    with nbe.Cluster.attach("quiet") as other:
        (slow,) = there() - before
        folder = cluster._link.run_folder.path / "results"
        for number in range(1, 5):
            job = cluster.run(os.getpid)
            if number == 2:
                told = lambda _: slow._jobs.get("job-1", (0, 0, False))[2] and not slow.unmapped_jobs
                until(lambda: in_driver(cluster, told))  # it has said that it has it, and is to be as if it had not
                in_driver(cluster, lambda _: setattr(slow, "unmapped_jobs", {"job-1"}))
            end_job(cluster, job, Outcome(value=blob(number, folder / job.name / "value")))
            assert job.result(timeout=10) == [number]
        assert sorted(path.name for path in folder.iterdir()) == ["job-1", "job-3", "job-4"]
        other.detach()
    until(lambda: sorted(path.name for path in folder.iterdir()) == ["job-3", "job-4"])


def test_what_a_dead_driver_has_left_of_old_jobs_is_removed(start_hostless):
    """Results of jobs that the next driver does not know."""
    cluster = start_hostless(keep=True)
    folder = cluster._link.run_folder.path / "results"
    for name in ("job-1", "job-2"):
        job = cluster.run(os.getpid)
        end_job(cluster, job, Outcome(value=blob(name, folder / name / "value")))
        job.result(timeout=10)
    driver_thread.kill_driver(cluster._link.run_folder, 0)
    with nbe.Cluster.attach("quiet", discovery=NoHosts()):
        assert [path.name for path in folder.iterdir()] == ["job-2"]
