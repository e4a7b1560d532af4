"""A job is accepted completely or not at all, and its arguments are pickled once."""

from __future__ import annotations

import errno
import os
import threading

import pytest

import nbelastic as nbe
from nbelastic.client.pickled_calls import pickle_call
from nbelastic.driver import driver_snapshot
from tests.support.processes import run_folder


@pytest.fixture
def cluster(start_hostless):
    return start_hostless("kept", keep=True)


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("what", ["program", "state", "script's state"])
def test_a_job_that_cannot_be_saved_is_refused(cluster, monkeypatch, what):
    """With a full disk the call is refused in one line, and the next call works as if it were the first."""
    with monkeypatch.context() as full:
        if what == "program":
            full.setattr("nbelastic.client.submission.replace_private", no_space)
        else:
            full.setattr(driver_snapshot.DriverSnapshot, "write", no_space)
        with pytest.raises(nbe.UsageError, match=r"job-1 cannot be saved in .*kept \(No space left on device\): free"):
            cluster.run_script(__file__) if what == "script's state" else cluster.run(os.getpid)
    assert cluster.job is None
    job = cluster.run(os.getpid)
    assert (job.name, job.status) == ("job-1", "running")
    assert driver_snapshot.DriverSnapshot.read(run_folder(cluster)).job.name == "job-1"


class CountsPickling:
    """An argument that records the thread of each pickling."""

    def __init__(self) -> None:
        self.pickled_by: list[str] = []

    def __reduce__(self):
        self.pickled_by.append(threading.current_thread().name)
        return CountsPickling, ()


def test_arguments_are_pickled_once_and_by_the_caller(cluster):
    """Arguments are pickled once, by the caller's thread, for all workers and for the next driver."""
    argument = CountsPickling()
    cluster.run(print, argument)
    assert argument.pickled_by == ["MainThread"]


def test_a_job_needs_no_folder_for_its_results(cluster, monkeypatch):
    """A job runs although a full disk leaves no folder for its results."""
    monkeypatch.setattr("nbelastic.driver.jobs.make_private", no_space)
    assert cluster.run(os.getpid).status == "running"
    assert cluster.status().job == "job-1"


def test_a_function_that_cannot_be_pickled_may_use_what_has_no_value_yet():
    """It is refused in one line like others, although not all of its variables can be looked at."""
    lock = threading.Lock()

    def train():
        return lock, later

    with pytest.raises(nbe.UsageError, match="'train' cannot be sent to the workers: TypeError: cannot pickle"):
        pickle_call(train, (), {})
    later = 1
