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
from tests.support.processes import run_folder
from tests.support.waiting import until


@pytest.mark.parametrize("where", ["message", "file"])
def test_a_result_outlives_its_cluster(start_hostless, where):
    """All clients get a result, in a message or in a file, although the cluster is stopped at once."""
    cluster = start_hostless()
    job = cluster.run(os.getpid)
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as other:
        path = run_folder(cluster) / "results" / job.name / "value" if where == "file" else None
        end_job(cluster, job, Outcome(value=blob({"loss": 0.5}, path)))
        cluster.stop()
        assert not run_folder(cluster).exists()
        assert job.result(timeout=10) == other.job.result(timeout=10) == [{"loss": 0.5}]


def test_a_missing_file_of_results_fails_the_job(start_hostless):
    """A missing file of results fails the job, not the thread that reads it."""
    cluster = start_hostless()
    job = cluster.run(os.getpid)
    end_job(cluster, job, Outcome(value=messages.Blob(7, path=str(run_folder(cluster) / "nowhere"))))
    with pytest.raises(nbe.JobError, match=r"succeeded, but its results cannot be read: .*No such file"):
        job.result(timeout=10)
    cluster.scale(2, 3)
    assert cluster.status().min == 2


def test_the_error_of_a_job_is_complete(start_hostless):
    """A job's error has its rank, worker and remote traceback, and each client gets one."""
    cluster = start_hostless()
    job = cluster.run(os.getpid)
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as other:
        end_job(cluster, job, Outcome("ValueError: no", "the remote traceback"))
        for each in (job, other.job):
            with pytest.raises(nbe.JobError, match="job-1 failed: it failed") as caught:
                each.result(timeout=10)
            error = caught.value
            assert (error.rank, error.worker, error.remote_traceback) == (0, "a/0#1", "the remote traceback")


def test_a_client_that_missed_the_end_of_jobs_gets_an_error(start_hostless):
    """A kernel that was stopped while several jobs ended gets an error for all but the last: the driver forgot them."""
    cluster = start_hostless()
    job = cluster.run(os.getpid)
    greeted = lambda: in_driver(cluster, lambda driver: set(driver._clients._greeted))
    before = greeted()
    with nbe.Cluster.attach("quiet") as other:
        (late,) = greeted() - before
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


def test_values_stay_until_all_clients_have_them(start_hostless):
    """A file of values stays until each client that knows of it has read it."""
    cluster = start_hostless()
    greeted = lambda: in_driver(cluster, lambda driver: set(driver._clients._greeted))
    before = greeted()
    with nbe.Cluster.attach("quiet") as other:
        (slow,) = greeted() - before
        folder = run_folder(cluster) / "results"
        for number in range(1, 5):
            job = cluster.run(os.getpid)
            if number == 2:
                has_value = lambda _: slow._jobs.get("job-1", (0, 0, False))[2] and not slow.unmapped_jobs
                until(lambda: in_driver(cluster, has_value))
                # The client has reported that it has the value: pretend that it has not.
                in_driver(cluster, lambda _: setattr(slow, "unmapped_jobs", {"job-1"}))
            end_job(cluster, job, Outcome(value=blob(number, folder / job.name / "value")))
            assert job.result(timeout=10) == [number]
        assert sorted(path.name for path in folder.iterdir()) == ["job-1", "job-3", "job-4"]
        other.detach()
    until(lambda: sorted(path.name for path in folder.iterdir()) == ["job-3", "job-4"])


def test_results_of_unknown_jobs_are_removed(start_hostless):
    """The next driver removes results of jobs that it does not know."""
    cluster = start_hostless(keep=True)
    folder = run_folder(cluster) / "results"
    for name in ("job-1", "job-2"):
        job = cluster.run(os.getpid)
        end_job(cluster, job, Outcome(value=blob(name, folder / name / "value")))
        job.result(timeout=10)
    driver_thread.kill_driver_of(cluster)
    with nbe.Cluster.attach("quiet", discovery=NoHosts()):
        assert [path.name for path in folder.iterdir()] == ["job-2"]
