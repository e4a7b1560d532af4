"""Output of several workers, folded while a cell runs."""

from __future__ import annotations

import pytest

from nbelastic.notebook.live_output import FOLD_TIME, LiveOutput


def lines(shown):
    return [("+".join(one.workers), one.text) for one in shown]


@pytest.fixture
def output():
    return LiveOutput("ab")


def test_a_line_that_all_have_is_shown_at_once(output):
    """It waits for the last worker, and is shown once."""
    output.add("a", "out", "one\n", now=1.0)
    assert lines(output.take(1.0)) == []
    output.add("b", "out", "one\n", now=1.1)
    assert lines(output.take(1.1)) == [("a+b", "one")]


def test_a_line_waits_for_others_only_for_a_while(output):
    """Then it is shown under the workers that have it. The later line of the other worker is shown under its own name."""
    output.add("a", "out", "one\n", now=1.0)
    assert lines(output.take(1.0 + FOLD_TIME)) == [("a", "one")]
    output.add("b", "out", "one\n", now=2.0)
    assert lines(output.take(2.0 + FOLD_TIME)) == [("b", "one")]


def test_each_worker_keeps_the_order_of_its_lines(output):
    """Equal lines are folded as long as that changes no order, also after different ones, which stay together."""
    for worker, text in (("a", "same\na1\na2\nend\n"), ("b", "same\nb1\nend\n")):
        output.add(worker, "out", text, now=1.0)
    assert lines(output.take_rest()) == [("a+b", "same"), ("a", "a1"), ("a", "a2"), ("b", "b1"), ("a+b", "end")]
    for worker, text in (("a", "x\ny\n"), ("b", "y\nx\n")):
        output.add(worker, "out", text, now=2.0)
    assert lines(output.take_rest()) == [("a", "x"), ("a+b", "y"), ("b", "x")]


def test_an_unfinished_line_is_shown_when_it_is_complete(output):
    """Or at the end of the cell, or before something is displayed."""
    output.add("a", "out", "be", now=1.0)
    output.add("b", "out", "begun\n", now=1.0)
    assert lines(output.take(1.0)) == []
    output.add("a", "out", "gun\nrest", now=1.1)
    assert lines(output.take(1.1)) == [("a+b", "begun")]
    output.add("a", "display", "{}", now=1.2)
    output.add("b", "err", "bad", now=1.2)
    assert lines(output.take_rest()) == [("a", "rest"), ("a", "{}"), ("b", "bad")]


def test_equal_text_of_different_streams_is_not_equal(output):
    output.add("a", "out", "x\n", now=1.0)
    output.add("b", "err", "x\n", now=1.0)
    assert lines(output.take_rest()) == [("a", "x"), ("b", "x")]
