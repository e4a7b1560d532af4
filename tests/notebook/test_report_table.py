"""What `cluster.reports` is: rows for pandas, and charts in a notebook."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree as ET

import pytest
from IPython.core.formatters import DisplayFormatter

from nbelastic.client.report_table import CHARTS, ReportTable
from nbelastic.protocol.report_history import MAX_ROWS, ReportHistory

SVG = "{http://www.w3.org/2000/svg}"


def table(sizes=(2, 4, 3), **values):
    history = ReportHistory()
    for step in range(300):
        generation = step * len(sizes) // 300
        numbers = {name: value(step) for name, value in values.items()}
        history.add((step + 1, 1e9 + step, generation + 1, sizes[generation]), numbers)
    return ReportTable(history)


def texts(made):
    return ["".join(each.itertext()) for each in ET.fromstring(made._repr_svg_()).iter(f"{SVG}text")]


def test_the_rows_are_a_list_of_dicts():
    """As `pandas.DataFrame` takes it."""
    rows = table(loss=lambda step: 1 / (step + 1))
    assert isinstance(rows, list)
    assert rows[1] == {"step": 2, "time": 1e9 + 1, "generation": 1, "size": 2, "loss": 0.5}


def test_a_notebook_shows_charts_and_saves_no_numbers():
    """One chart per name, with the newest value and the changes of the world; beside them one line of text."""
    rows = table(loss=lambda step: 300 - step, accuracy=lambda step: step / 300)
    bundle, _ = DisplayFormatter().format(rows)
    assert bundle["text/plain"] == "300 rows of step, time, generation, size, loss, accuracy"
    assert "image/svg+xml" in bundle
    shown = texts(rows)
    assert [text for text in shown if text in ("loss 1", "accuracy 0.9967")] == ["loss 1", "accuracy 0.9967"]
    assert shown.count("2→4") == shown.count("4→3") == 2


def test_a_value_that_was_not_reported_is_a_gap():
    """The line ends before it and begins anew after it. Names without numbers, and those beyond three, have no chart."""
    some = table(loss=lambda step: None if step == 100 else float(step), never=lambda _: float("nan"))
    (line,) = (path for path in ET.fromstring(some._repr_svg_()).iter(f"{SVG}path") if path.get("fill") == "none")
    assert line.get("d").count("M") == 2
    many = table(**{f"name{i}": float for i in range(CHARTS + 2)})
    assert len([text for text in texts(many) if text.startswith("name")]) == CHARTS


@pytest.mark.parametrize("numbers", [(1e308, -1e308), (0.0, 5e-324), (1.7e308, 1.7e308), (1e-320, 2e-320)])
def test_the_largest_and_the_smallest_numbers_have_a_chart(numbers):
    """A diverging loss must not end the cell with an error; nor does the mean of many such values in a row."""
    odd = table(loss=lambda step: numbers[step % 2])
    places = re.findall(
        r"[-\d.einfa]+", "".join(path.get("d") for path in ET.fromstring(odd._repr_svg_()).iter(f"{SVG}path"))
    )
    assert all(-1 <= float(place) <= 301 for place in places)
    history = ReportHistory()
    for step in range(3 * MAX_ROWS):
        history.add((step + 1, 1e9 + step, 1, 2), {"loss": numbers[0]})
    assert all(row[4] is None or math.isfinite(row[4]) for row in history.rows)


def test_equal_values_and_a_single_row_are_charts_too():
    """And without a report there is none."""
    assert "loss 5" in texts(table(loss=lambda _: 5.0))
    one = ReportHistory()
    one.add((1, 1e9, 1, 2), {"<loss>": 2.0})
    assert "<loss> 2" in texts(ReportTable(one))
    empty = ReportTable(ReportHistory())
    assert DisplayFormatter().format(empty)[0] == {"text/plain": "no reports"}
