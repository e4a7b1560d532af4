"""How long the ranks' steps took, over the last minutes."""

from __future__ import annotations

from nbelastic.driver.step_time_table import COLUMNS, LONGEST, SPAN, StepTimeTable
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.status import RankStepTimes, StepTimes

A, B = WorkerId("a", 0, 1), WorkerId("b", 0, 1)
MEMBERS = (B, A)


def said_of(worker: WorkerId) -> str:
    return "is slow" if worker.host == "a" else ""


def rows(table: StepTimeTable) -> list[tuple[float | None, ...]]:
    return [rank.times for rank in table.show(said_of).ranks]


def test_rows_are_the_ranks_of_the_newest_world():
    """The row goes on when the worker is replaced; between them nothing is known."""
    table = StepTimeTable()
    table.add(A, MEMBERS, 1, 8.0, 101.0)
    table.add(B, MEMBERS, 1, 9.0, 104.0)
    successor = WorkerId("b", 0, 2)
    table.add(A, (A, successor), 2, 8.5, 116.0)
    table.add(successor, (A, successor), 2, 70.0, 119.9)
    assert table.show(said_of) == StepTimes(
        SPAN,
        120.0,
        (
            RankStepTimes("a/0#1", 0, (8.0, None, None, 8.5), "is slow"),
            RankStepTimes("b/0#2", 1, (9.0, None, None, 70.0)),
        ),
    )


def test_a_report_covers_the_time_since_the_last_one():
    """Reports come a little less often than every 5 s, and with long steps much less often. After a long silence it covers one column."""
    table = StepTimeTable()
    for at in (100.0, 105.3, 115.2):
        table.add(A, (A,), 1, at, at)
    assert rows(table) == [(100.0, 105.3, 115.2, 115.2)]
    table.add(A, (A,), 1, 7.0, 115.2 + (LONGEST + 1) * SPAN)
    assert rows(table)[0][4:] == (*[None] * LONGEST, 7.0)


def test_a_column_that_lacks_reports_is_not_shown_yet():
    """Else a rank would be compared with none."""
    table = StepTimeTable()
    for at in (104.8, 109.9):
        for w in MEMBERS:
            table.add(w, MEMBERS, 1, at, at)
    table.add(A, MEMBERS, 1, 40.0, 110.2)
    assert rows(table) == [(104.8, 109.9)] * 2
    table.add(B, MEMBERS, 1, 9.0, 114.9)
    assert rows(table) == [(104.8, 109.9, 9.0), (104.8, 109.9, 40.0)]


def test_a_long_job_keeps_the_last_minutes():
    """And nothing of slots that are gone, or of the future after the clock was set back."""
    table = StepTimeTable()
    table.add(B, (A, B), 1, 1.0, 0.0)
    for number in range(2 * COLUMNS):
        table.add(A, (A,), 1, float(number), number * SPAN)
    assert rows(table) == [tuple(map(float, range(COLUMNS, 2 * COLUMNS)))]
    assert len(table._rows) == 1
    table.add(A, (A,), 1, 5.0, 50.0)
    assert rows(table) == [(5.0,)]


def test_without_reports_there_are_no_ranks():
    assert StepTimeTable().show(said_of).ranks == ()
