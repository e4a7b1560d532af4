"""The error of a job in the output of the cell that has begun it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
from fake_cluster import FakeJob

from nbelastic.errors import ClusterStoppedError, JobError, JobStoppedError
from nbelastic.notebook import failed_jobs
from nbelastic.notebook.failed_jobs import show_failure_here

CELL = ContextVar("CELL", default="")


class EndedLater(FakeJob):
    """A job whose future the test resolves."""

    def __init__(self):
        super().__init__()
        self._copy = SimpleNamespace(future=Future())
        self.done = self._copy.future.done


@pytest.fixture
def shown(monkeypatch):
    """Displayed errors, as in a notebook, each with the context that is valid then."""
    shown = []
    monkeypatch.setattr(failed_jobs, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda error: shown.append((error, CELL.get())))
    return shown


def test_the_error_of_a_job_appears_below_the_cell_that_has_begun_it(shown):
    """The cell has ended when its job fails in another thread: the error is added to the output of that cell."""
    job, error = EndedLater(), JobError("job-1 failed: rank 0 raised NameError: name 'x' is not defined")
    CELL.set("the cell with the job")
    show_failure_here(job)
    CELL.set("a later cell")
    fail = threading.Thread(target=job._copy.future.set_exception, args=(error,))
    fail.start()
    fail.join()
    assert shown == [(error, "the cell with the job")]


@pytest.mark.parametrize(
    "error", [None, JobStoppedError("stopped by you"), ClusterStoppedError("the cluster was stopped")]
)
def test_nothing_appears_below_the_cell_of_a_job_that_did_not_fail(shown, error):
    """The user has stopped the job, or the cluster has ended."""
    job = EndedLater()
    show_failure_here(job)
    job._copy.future.set_exception(error) if error else job._copy.future.set_result([])
    assert shown == []
