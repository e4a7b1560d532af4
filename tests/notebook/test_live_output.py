"""Output of several workers, folded while a cell runs."""

from __future__ import annotations

import pytest

from nbelastic.notebook.live_output import FOLD_TIME, LIVE_AFTER, LiveOutput


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


def live(output, now):
    return [("+".join(workers), text) for workers, text in output.live(now)]


def test_a_line_without_an_end_is_live(output):
    """It is there once it has had no end for a while. Equal ones are one; a line that has ended is shown as any other."""
    for worker in "ab":
        output.add(worker, "out", "loading", now=1.0)
    assert live(output, 1.1) == []
    assert live(output, 1.0 + LIVE_AFTER) == [("a+b", "loading")]
    output.add("a", "out", "…", now=2.0)
    assert live(output, 2.0) == [("a", "loading…"), ("b", "loading")]
    output.add("a", "out", " done\n", now=2.1)
    output.add("b", "out", " done\nnext", now=2.1)
    assert live(output, 2.1) == []
    assert lines(output.take(2.1 + FOLD_TIME)) == [("a", "loading… done"), ("b", "loading done")]
    assert live(output, 2.1 + LIVE_AFTER) == [("b", "next")]


def test_of_a_progress_bar_the_newest_frame_is_live(output):
    """Its end is one line. One that clears itself leaves none."""
    for frame in ("\r 0%", "\r50%", "\r99%\r100%"):
        output.add("a", "err", frame, now=1.0)
        output.add("b", "err", frame, now=1.0)
    assert live(output, 2.0) == [("a+b", "100%")]
    output.add("a", "err", "\n", now=2.0)
    output.add("b", "err", "\r     \r", now=2.0)
    assert live(output, 3.0) == []
    assert [(one.workers, one.kind, one.text.strip()) for one in output.take_rest()] == [(["a"], "err", "100%")]


def test_nested_progress_bars_are_live_below_one_another(output):
    """`tqdm` steps down to the inner bar and up again for each frame. The lines end when the cursor has passed them."""
    output.add("a", "err", "\router 0/2", now=1.0)
    for frame in ("inner 1/3", "inner 2/3", "inner 3/3"):
        output.add("a", "err", f"\n\r{frame}\x1b[A", now=1.0)
    assert live(output, 2.0) == [("a", "outer 0/2"), ("a", "inner 3/3")]
    output.add("a", "err", "\router 1/2\n\r         \r\x1b[A", now=2.0)
    assert live(output, 3.0) == [("a", "outer 1/2")]
    output.add("a", "err", "\router 2/2\n", now=3.0)
    assert [one.text.strip() for one in output.take_rest()] == ["outer 2/2"]


def test_lines_that_were_shown_are_forgotten(output):
    """A cell that prints for days costs the notebook no memory."""
    for number in range(100):
        output.add("a", "out", f"line {number}\n", now=1.0)
        output.add("b", "out", f"line {number}\n", now=1.0)
    assert len(lines(output.take(1.0))) == 100
    assert not output._counts


def test_a_cursor_that_is_moved_up_by_an_absurd_number_ends_no_cell():
    """Python refuses to read a number of thousands of digits, as binary data may have one by chance."""
    output = LiveOutput(["a"])
    output.add("a", "out", f"one\x1b[{'9' * 5000}Atwo\n")
    assert [shown.text for shown in output.take_rest()] == [f"one\x1b[{'9' * 5000}Atwo"]
