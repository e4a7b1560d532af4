"""What a worker reports of its progress, and how reliably: no process, no socket, no clock."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from nbelastic.protocol import worker_messages
from nbelastic.protocol.json_encoding import encode
from nbelastic.transport.sockets import MAX_MESSAGE
from nbelastic.worker.protocol import Send
from tests.worker.worker_protocol import CONNECTED, commit


def progress(worker, now, line=CONNECTED):
    """The progress reports at `now`, each as (reliable, message)."""
    found = [action for action in worker.tick(now, line) if isinstance(action, Send)]
    return [
        (not action.newest, action.message)
        for action in found
        if isinstance(action.message, worker_messages.WorkerProgress)
    ]


def values(worker, now):
    return [(sure, message.report) for sure, message in progress(worker, now)]


def test_the_first_and_the_last_commit_are_reported_reliably(worker):
    """Most reports may be lost, as the newest counts; the first of a generation and the last of a program may not."""
    worker.telemetry.begin(5.0, 0.0)
    ((sure, first),) = progress(worker, 1.0)
    assert (sure, first.first) == (True, 5.0)
    commit(worker)
    ((sure, next_),) = progress(worker, 3.0)
    assert (sure, next_.first, next_.commit) == (False, None, 1)
    commit(worker)
    worker.facts.busy = False
    ((sure, last),) = progress(worker, 5.0)
    assert (sure, last.commit) == (True, 2)


def test_the_first_report_is_about_the_generation_of_its_commit(worker):
    """A rank that leaves right after its first commit still reports from which commit its world continued."""
    continued = worker_messages.Copies(100, 3, continued=worker_messages.Continued(1, 3, size=2))
    worker.telemetry.copies = lambda _: continued
    worker.telemetry.begin(5.0, 0.0)
    worker.telemetry.copies = None
    ((_, first),) = progress(worker, 1.0)
    assert first.copies == continued


def test_rank_0_reports_more_often(worker):
    """Other ranks report only their commit."""
    commit(worker)
    assert len(progress(worker, 1.0)) == 1
    commit(worker)
    assert not progress(worker, 1.9)
    worker.rank = 0
    assert len(progress(worker, 2.1)) == 1
    commit(worker)
    assert len(progress(worker, 2.4)) == 1


@pytest.mark.parametrize(("size", "period"), [(512, 1.0), (4000, 1.0), (10_000, 2.5), (1_000_000, 5.0)])
def test_ranks_of_a_large_world_report_less_often(worker, size, period):
    """Of a world of up to 20,000 ranks the driver gets about 4,000 reports per second. No rank waits longer than 5 s."""
    worker.formation = replace(worker.formation, world_size=size)
    commit(worker)
    assert len(progress(worker, 1.0)) == 1
    commit(worker)
    assert not progress(worker, 1.0 + period - 0.01)
    assert len(progress(worker, 1.0 + period)) == 1
    worker.rank = 0
    commit(worker)
    assert len(progress(worker, 1.0 + 2 * period)) == 1
    commit(worker)
    assert len(progress(worker, 1.0 + 2 * period + 0.25)) == 1


def test_a_loss_that_is_nan_in_one_step_is_sent_at_once(worker):
    """Before the next sample is due, reliably, even if the next step's loss is a number again."""
    commit(worker)
    worker.telemetry.put({"loss": 0.5})
    progress(worker, 1.0)
    commit(worker)
    assert worker.telemetry.put({"loss": float("nan"), "step": 5.0})
    worker.telemetry.put({"loss": 0.4, "step": 6.0})
    assert values(worker, 1.01) == [(True, {"loss": None, "step": 6.0})]
    commit(worker)
    assert values(worker, 3.0) == [(False, {"loss": 0.4, "step": 6.0})]


def test_a_loss_that_stays_infinite_is_urgent_once(worker):
    """From the second sample on it is sent like any other value, however many steps report it."""
    sure = []
    for second in range(1, 10, 2):
        commit(worker)
        for _ in range(3):
            worker.telemetry.put({"loss": float("inf")})
            sure += [is_sure for is_sure, _ in values(worker, second + 0.01)]
    assert sure == [True, False, False, False, False]


def test_a_commit_that_becomes_whole_between_commits_is_reported(worker):
    """A long step does not delay the report; without news about the copies nothing is sent."""
    whole = 3

    def copies(now):
        return worker_messages.Copies(300, whole, age=now, seconds=0.4, buddies=(0,))

    worker.telemetry.copies = copies
    commit(worker)
    assert [message.copies for _, message in progress(worker, 1.0)] == [copies(1.0)]
    assert not progress(worker, 3.0)
    whole = 4
    assert [message.copies for _, message in progress(worker, 5.0)] == [copies(5.0)]


def test_a_nan_that_the_next_report_lacks_is_sent(worker):
    """For example a validation loss, which only some steps report."""
    worker.telemetry.put({"validation": float("nan")})
    worker.telemetry.put({"loss": 0.4})
    assert values(worker, 1.0) == [(True, {"loss": 0.4, "validation": None})]


def test_a_nan_after_the_last_commit_is_sent(worker):
    """The program reports it and ends: no later commit would include it."""
    commit(worker)
    progress(worker, 1.0)
    worker.telemetry.put({"loss": float("nan")})
    worker.facts.busy = False
    assert values(worker, 1.01) == [(True, {"loss": None})]


def test_many_figures_without_a_driver_fit_in_one_message(worker):
    """A program with 300 figures trains on without a driver. Its report to the next one has some of all times, and the newest."""
    figures = {f"layer {number}/norm of the gradient": 1 / 3 for number in range(300)}
    for commits in range(1, 2001):
        worker.facts.unsent.add(commits, figures)
    report = worker.report(1, "")
    assert len(encode(report)) < MAX_MESSAGE
    kept = [commits for commits, _ in report.reports]
    assert kept[0] == 1
    assert kept[-1] == 2000
    assert max(later - earlier for earlier, later in pairwise(kept)) < 300
