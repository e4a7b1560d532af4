"""Submits jobs to the driver. A pickled call goes there through a file of the run folder."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from nbelastic.client.checkpoints import CheckpointPlan
from nbelastic.client.driver_link import DriverLink
from nbelastic.client.imported_names import names_in_function, names_in_text
from nbelastic.client.job_copy import JobCopy
from nbelastic.client.waiting import ANSWER_TIMEOUT
from nbelastic.errors import ClusterStoppedError, JobError, UsageError
from nbelastic.protocol import messages, requests, worker_messages
from nbelastic.system import pickling
from nbelastic.system.private_files import replace_private


def submit_cell(link: DriverLink, source: str, checkpoints: CheckpointPlan) -> JobCopy:
    """Submit a cell that each worker runs as its program. UsageError, and no job, if a job runs already."""
    _refuse_second_job(link)
    code = link.send_code(names_in_text(source))
    return submit(link, requests.Submit(worker_messages.Program("", "", checkpoints, source, None, code=code)))


def submit_call(link: DriverLink, pickle: Callable[[], list[memoryview]], checkpoints: CheckpointPlan) -> JobCopy:
    """Submit the call that `pickle()` returns.

    UsageError, and no job, if a job runs already or if the call cannot be pickled or saved.
    """
    _refuse_second_job(link)  # before the pickling, which may be slow; the driver checks again
    call = _save_call(link, pickle())
    try:
        code = link.send_code(names_in_function(pickle))
        return submit(link, requests.Submit(worker_messages.Program("", "", checkpoints, "", call, code=code)))
    except BaseException:
        _remove_call(call)
        raise


def swap_cell(link: DriverLink, source: str, checkpoints: CheckpointPlan) -> JobCopy:
    """Replace the present job's program by a cell, and wait for its first commit. Errors are those of `_swap`."""
    _refuse_checkpoints(checkpoints)
    code = link.send_code(names_in_text(source))
    return _swap(link, worker_messages.Program("", "", None, source, None, code=code))


def swap_call(link: DriverLink, pickle: Callable[[], list[memoryview]], checkpoints: CheckpointPlan) -> JobCopy:
    """The same by the call that `pickle()` returns."""
    _refuse_checkpoints(checkpoints)
    code = link.send_code(names_in_function(pickle))
    return _swap(link, worker_messages.Program("", "", None, "", _save_call(link, pickle()), code=code))


def _refuse_checkpoints(checkpoints: CheckpointPlan) -> None:
    if checkpoints is not None:
        raise UsageError("a new program goes on with the checkpoints of the job: leave out checkpoint.")


def _swap(link: DriverLink, program: worker_messages.Program) -> JobCopy:
    """JobError if the new program ends before its first commit; the old one goes on. UsageError if no job trains."""
    waits_for = "the new program to make its first commit"
    try:
        outcome: requests.SwapOutcome = link.ask(requests.Swap("you", program), None, waits_for, cancel=True)
    except UsageError:  # else the driver removes it or, if it has accepted the program, needs it
        _remove_call(program.call)
        raise
    if outcome.error:
        text = f"the old program of {outcome.job} goes on, as the new one failed: {outcome.error}"
        raise JobError(text, rank=outcome.rank, worker=outcome.worker, remote_traceback=outcome.traceback)
    for note in outcome.notes:
        print(f"{outcome.job}: {note}.")
    return link.running().jobs[outcome.job]


def submit(link: DriverLink, request: requests.Submit | requests.SubmitScript) -> JobCopy:
    """Submit a job and return its copy."""
    driver = link.running()
    name = link.ask(request, ANSWER_TIMEOUT, "the driver to accept the job")
    return driver.jobs[name]


def _save_call(link: DriverLink, call: list[memoryview]) -> messages.Blob:
    """Write the call into a file, which the next driver finds. UsageError if the disk is full."""
    size = pickling.size(call)
    path = link.run_folder.path / f"{secrets.token_hex(8)}.program"
    try:
        replace_private(path, call)
    except OSError as error:
        raise requests.not_saved(f"job-{link.running().submitted_jobs + 1}", path.parent, error) from None
    return messages.Blob(size, path=str(path))


def _remove_call(call: messages.Blob | None) -> None:
    if call is not None and call.path:
        Path(call.path).unlink(missing_ok=True)


def _refuse_second_job(link: DriverLink) -> None:
    driver = link.running()
    if driver.fault:
        raise ClusterStoppedError(f"{driver.fault}.")
    requests.refuse_second_job(driver.present_job)
