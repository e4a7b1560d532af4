"""New programs that are not kept: what the client learns."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from nbelastic.core.state import Stage
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.pending import Pending
from nbelastic.driver.swaps import Swaps
from nbelastic.errors import UsageError
from nbelastic.protocol import requests, worker_messages
from tests.core.story import wid, with_stage


class Swap:
    """A swap that a client has asked for, up to its answer."""

    def __init__(self, program: int = 0) -> None:
        """`program`: the number of the one that runs."""
        self.cluster, self.answer, posted = with_stage(Stage.RUNNING).cluster, Future(), []
        self.cluster = replace(self.cluster, job=replace(self.cluster.job, program=program))
        self.pending = Pending(lambda: self.cluster, posted.append, RuntimeError, lambda: None)
        self.swaps = Swaps(self.pending, SimpleNamespace(), posted.append)
        request = requests.Swap("you", worker_messages.Program("", "", source="a cell"))
        self.swaps.submit(request, JobRun("job-1", None), self.cluster, self.answer)
        self.event = posted[0]

    def decide(self, **halt_or_job):
        """The core has decided: `swap` or `succeeded`."""
        halt, job = self.cluster.halt, self.cluster.job
        halt = replace(halt, swap=halt_or_job.get("swap", 0))
        job = replace(job, succeeded=halt_or_job.get("succeeded", job.succeeded))
        self.cluster = replace(self.cluster, halt=halt, job=job)
        self.pending.on_decisions([self.event])
        self.pending.check()
        return self.answer


@pytest.fixture
def swap():
    return Swap()


def test_a_rejected_program_has_its_reason(swap):
    """Also if no worker has reported an error of it."""
    number = swap.event.program
    assert not swap.decide(swap=number).done()
    swap.swaps.reject(number, "rank 0 raised RuntimeError: sizes differ (3 times in a row)")
    outcome = swap.decide().result(timeout=0)
    assert (outcome.job, outcome.error) == ("job-1", "rank 0 raised RuntimeError: sizes differ (3 times in a row)")


def test_the_error_that_a_worker_has_reported_is_the_reason(swap):
    """It has a traceback."""
    number = swap.event.program
    swap.swaps.receive(worker_messages.SwapReport(wid("b/0#1"), number, error="ValueError: no", traceback="line 7"), 1)
    swap.swaps.reject(number, "rank 1 raised ValueError: no")
    outcome = swap.decide().result(timeout=0)
    assert (outcome.error, outcome.rank, outcome.worker, outcome.traceback) == ("ValueError: no", 1, "b/0#1", "line 7")


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        ({"succeeded": frozenset([wid("a/0#1")])}, "the training has ended"),
        ({}, "another new program came first"),
    ],
)
def test_a_program_that_was_not_tried_has_its_reason_too(swap, decision, reason):
    """A rank has returned before the halt, or two clients have asked at the same time."""
    with pytest.raises(UsageError, match=f"the program of job-1 was not replaced: {reason}"):
        swap.decide(**decision).result(timeout=0)


def test_the_number_of_a_new_program_is_higher_than_that_of_the_present_one():
    """Also after the machine's clock was set back: workers and the core take the higher number for the newer program."""
    of_the_future = time.time_ns() * 2
    assert Swap(of_the_future).event.program > of_the_future
