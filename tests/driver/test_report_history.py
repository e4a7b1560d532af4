"""The history of what rank 0 reported: bounded, complete from the first step to the last, and sent in parts."""

from __future__ import annotations

import itertools
import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from nbelastic.driver.telemetry import SavedReports, Telemetry
from nbelastic.protocol.json_encoding import encode
from nbelastic.protocol.report_history import MAX_NAMES, MAX_ROWS, ReportHistory, ReportRows


def history(count, *, first=1, every=1):
    made = ReportHistory()
    for step in range(first, first + count):
        made.add((step * every, 1e9 + step, 1, 4), {"loss": 1000.0 / step})
    return made


def test_100_000_reports_are_at_most_2_000_rows():
    """From the first step to the newest ones, with equal distances; each value is the mean of as many reports."""
    made = history(100_000)
    assert MAX_ROWS / 2 <= len(made.rows) < MAX_ROWS
    steps = [row[0] for row in made.rows]
    assert {b - a for a, b in itertools.pairwise(steps)} == {made.reports_per_row}
    assert 100_000 - steps[-1] < made.reports_per_row
    first = [1000.0 / step for step in range(1, made.reports_per_row + 1)]
    assert math.isclose(made.rows[0][4], sum(first) / len(first))


def test_a_copy_gets_only_new_rows():
    """After the whole history, one more report is one row. A history whose rows were joined is sent whole again."""
    original, copy = history(10), ReportHistory()
    copy.apply(original.since(copy.version, len(copy.rows)))
    original.add((11, 1e9, 2, 3), {"loss": 0.5})
    part = original.since(copy.version, len(copy.rows))
    assert (part.start, part.rows) == (10, [[11, 1e9, 2, 3, 0.5]])
    copy.apply(part)
    assert copy.rows == original.rows
    assert original.since(copy.version, 11).rows == []


@given(st.lists(st.tuples(st.integers(1, 6000), st.integers(0, 3)), max_size=12))
def test_a_copy_equals_its_original(bursts):
    """Whatever is reported between two updates: joined rows, steps that go back, new names. The steps always grow."""
    original, copy, step = ReportHistory(), ReportHistory(), 0
    for count, back in bursts:
        step = max(0, step - 700 * back)
        for _ in range(count // 3):
            step += 1
            original.add((step, 1.0, 1, 2), {"loss": 1.0, f"name-{step // 3000}": 2.0})
        packed = msgspec.json.encode(original.since(copy.version, len(copy.rows)))
        copy.apply(msgspec.json.decode(packed, type=ReportRows))
        assert (copy.rows, copy.names, copy.version) == (original.rows, original.names, original.version)
        assert len(copy.rows) < MAX_ROWS
        steps = [row[0] for row in copy.rows]
        assert steps == sorted(set(steps))


def test_a_training_that_goes_back_replaces_later_rows():
    """A job that returns to the commit of a checkpoint has one value per step."""
    made = history(10)
    made.add((6, 2e9, 2, 3), {"loss": 7.0})
    assert [row[0] for row in made.rows] == [1, 2, 3, 4, 5, 6]
    assert made.rows[-1] == [6, 2e9, 2, 3, 7.0]


def test_the_next_driver_continues_the_history():
    """With the same rows, to which as many reports are joined; clients get all rows anew."""
    before, after = Telemetry(), Telemetry()
    before.history = history(5000)
    after.load_reports(msgspec.json.decode(encode(before.saved_reports()), type=SavedReports))
    assert after.history.rows == before.history.rows
    assert after.history.reports_per_row == before.history.reports_per_row > 1
    assert after.history.version != before.history.version
    after.history.add((5001, 1e9, 2, 3), {"loss": 0.1})
    assert len(after.history.rows) in (len(before.history.rows), len(before.history.rows) + 1)


def test_a_generation_has_one_size():
    """Its last reports may arrive when some of its members are lost already."""
    made = ReportHistory()
    for step, (generation, size) in enumerate(((1, 4), (1, 3), (2, 3), (2, 3), (3, 4)), 1):
        made.add((step, 1e9, generation, size), {"loss": 1.0})
    assert [row[2:4] for row in made.rows] == [[1, 4], [1, 4], [2, 3], [2, 3], [3, 4]]


def test_reports_without_numbers_change_nothing():
    """Also of a rank 0 that has made no commit yet, and a second report of one step."""
    made = history(3)
    before, version = list(made.rows), made.version
    for step, values in ((0, {}), (1, {"phase": "warm-up"}), (3, {"loss": 9.0})):
        made.add((step, 1e9, 1, 4), values)
    assert (made.rows, made.version) == (before, version)


def test_a_program_may_report_a_step_of_its_own():
    """A row then has both: the number of the commit, and the step that the program has reported."""
    made = ReportHistory()
    made.add((41, 1.0, 2, 4), {"loss": 0.5, "step": 35.0})
    assert list(made.records()) == [{"commit": 41, "time": 1.0, "generation": 2, "size": 4, "loss": 0.5, "step": 35.0}]


def test_values_that_are_missing_or_not_finite_are_gaps():
    """A mean leaves them out. Names beyond the sixteenth are not kept."""
    made = ReportHistory(None, 2)
    made.add((1, 1.0, 1, 2), {"loss": math.nan, "accuracy": 0.5})
    made.add((2, 2.0, 1, 2), {"loss": 3.0})
    made.add((3, 3.0, 1, 2), {"loss": math.inf})
    made.add((4, 4.0, 1, 2), {"loss": math.nan, **{f"n{i}": 1.0 for i in range(20)}})
    assert made.rows[0] == [2, 2.0, 1, 2, 3.0, 0.5]
    assert made.rows[1][:6] == [4, 4.0, 1, 2, None, None]
    assert len(made.names) == MAX_NAMES
    assert next(made.records()) == dict(
        zip(("step", "time", "generation", "size", *made.names), [2, 2.0, 1, 2, 3.0, 0.5] + [None] * 14)
    )
