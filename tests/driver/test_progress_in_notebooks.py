"""Jobs in a notebook without the dashboard: the line of a wait, and what a cell shows that ends with a job."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nbelastic.client import progress
from nbelastic.client.job import Job
from nbelastic.client.progress import describe_progress
from nbelastic.errors import JobError
from tests.driver.test_progress import RUNNING, job_of


@pytest.fixture
def notebook(monkeypatch):
    """Make this process a notebook's kernel; a list of the texts of its changing output."""
    shown = []

    def display(bundle, **_):
        shown.append(bundle["text/plain"])
        return SimpleNamespace(update=lambda bundle, **_: shown.append(bundle["text/plain"]))

    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    return shown


def test_a_wait_in_a_notebook_shows_one_line(notebook):
    """It changes in place, and is empty at the end, so that a stored output does not depend on time."""
    assert job_of().result(timeout=10) == [7]
    assert notebook == ["", describe_progress(RUNNING), ""]


def test_a_wait_under_a_dashboard_shows_no_line(notebook, monkeypatch):
    """The dashboard has all of it."""
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=None))
    job = job_of()
    assert Job(lambda: job._driver, job._copy, has_view=lambda: True)._progress_line() is None
    assert job._progress_line() is not None


def test_a_running_job_is_shown_by_what_stays_true():
    """The text is still under its cell when the job has ended. It has no numbers: stored outputs are compared in tests."""
    shown = job_of()._repr_html_()
    assert shown.startswith("<div><strong>job-1</strong> has begun.</div>")
    assert "running" not in shown
    assert "<code>%elastic_logs</code>" in shown


def test_a_failed_job_is_shown_with_its_traceback():
    """All text of the program is escaped."""
    job = job_of()
    job._copy.future.set_exception(JobError("job-1 failed: <b>", rank=0, remote_traceback="File <cell>\n  1/0\n"))
    assert job._repr_html_() == (
        "<div><strong>job-1</strong>: failed</div><div><strong>JobError</strong>: job-1 failed: &lt;b&gt;</div>"
        "<pre>File &lt;cell&gt;\n  1/0</pre>"
    )


def test_an_interrupted_wait_shows_one_line(monkeypatch):
    """The user ends the wait, not the job: IPython shows what goes on, without the traceback of nbelastic's own wait."""

    def interrupt(*_):
        raise KeyboardInterrupt

    job = job_of()
    monkeypatch.setattr("nbelastic.client.job.wait_for_result", interrupt)
    with pytest.raises(KeyboardInterrupt) as error:
        job.result()
    assert error.value._render_traceback_() == [
        "KeyboardInterrupt: no longer waiting; the cluster and its job go on, and %elastic_dashboard shows them."
    ]
    assert not job.done()
