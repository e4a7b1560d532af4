"""How long the ranks' steps took, over the last minutes."""

from __future__ import annotations

from nbelastic.driver.step_time_table import COLUMNS, SPAN, StepTimeTable
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.status import RankStepTimes, StepTimes

A, B = WorkerId("a", 0, 1), WorkerId("b", 0, 1)
MEMBERS = (B, A)


def said_of(worker: WorkerId) -> str:
    return "is slow" if worker.host == "a" else ""


def test_rows_are_the_ranks_of_the_newest_world():
    """A column without a report is empty; the row goes on when the worker is replaced."""
    table = StepTimeTable()
    table.add(A, MEMBERS, 8.0, 101.0)
    table.add(B, MEMBERS, 9.0, 104.0)
    table.add(A, MEMBERS, 8.5, 106.0)
    successor = WorkerId("b", 0, 2)
    table.add(successor, (A, successor), 70.0, 119.9)
    assert table.show(said_of) == StepTimes(
        SPAN,
        120.0,
        (
            RankStepTimes("a/0#1", 0, (8.0, 8.5, None, None), "is slow"),
            RankStepTimes("b/0#2", 1, (9.0, None, None, 70.0)),
        ),
    )


def test_a_long_job_keeps_the_last_minutes():
    table = StepTimeTable()
    for number in range(2 * COLUMNS):
        table.add(A, (A,), float(number), number * SPAN)
    (row,) = table.show(said_of).ranks
    assert row.times == tuple(map(float, range(COLUMNS, 2 * COLUMNS)))


def test_without_reports_there_are_no_ranks():
    assert StepTimeTable().show(said_of).ranks == ()
