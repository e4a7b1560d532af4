"""Shows the error of a job below the cell that has begun it, although that cell has ended long before."""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from nbelastic.client.notebook_line import in_notebook
from nbelastic.errors import JobError, JobStoppedError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from nbelastic.client.job import Job


def show_failure_here(job: Job) -> None:
    """When this job fails, add its error to the output of the cell that runs now. A job that was stopped has no error.

    A copy of the context has what the kernel's messages name as their cell.
    """
    if in_notebook() and not job.done():
        context = copy_context()
        job._copy.future.add_done_callback(lambda future: context.run(_show_failure, future))


def _show_failure(future: Future[Any]) -> None:
    from IPython.display import display

    error = future.exception()
    if isinstance(error, JobError) and not isinstance(error, JobStoppedError):
        display(error)
