"""Equal lines of different workers are folded into one, by the same rule as in the widget."""

from __future__ import annotations

from nbelastic.notebook.log_folding import CLOSE, fold_lines, pack_lines
from nbelastic.protocol.output_buffer import Line


def lines(*printed):
    return [
        (worker, Line(n, stream, text, rank, float(n))) for n, (worker, stream, text, rank) in enumerate(printed, 1)
    ]


def test_equal_lines_close_together_are_one_and_each_order_is_kept():
    """The widget's own test of its `LogFold` has the same lines."""
    printed = [(w, "out", text, None) for w, texts in (("a", "xyx"), ("b", "xyxz")) for text in texts]
    folded = fold_lines(lines(*printed, ("b", "err", "z", None), ("a", "out", "y", None)))
    found = [line.text + ":" + "".join(worker for worker, _ in line.writers) for line in folded]
    assert found == ["x:ab", "y:ab", "x:ab", "z:b", "z:b", "y:a"]
    assert [line.number for line in folded] == [4, 5, 6, 7, 8, 9]


def test_equal_lines_of_one_worker_with_two_ranks_stay_apart():
    """A worker that prints the same again as another rank prints another line."""
    folded = fold_lines(lines(("a", "out", "begin", 2), ("a", "out", "begin", 1), ("b", "out", "begin", 0)))
    assert [line.writers for line in folded] == [[("a", 2), ("b", 0)], [("a", 1)]]


def test_equal_lines_far_apart_are_two():
    """Otherwise a new line would be shown far above the end."""
    far = [("a", "out", f"line {i}", 0) for i in range(CLOSE + 1)]
    folded = fold_lines(lines(("a", "out", "x", 0), *far, ("b", "out", "x", 1), ("c", "out", "x", 2)))
    assert [line.writers for line in folded if line.text == "x"] == [[("a", 0)], [("b", 1), ("c", 2)]]


def test_writers_are_sent_once_and_lines_name_them_by_runs():
    """In the order of ranks; writers without a rank are last. A line has the time of its first writer."""
    printed = [("c", "out", "x", 2), ("a", "out", "x", 0), ("b", "out", "x", 1), ("s", "err", "y", None)]
    writers, (rows, none) = pack_lines((fold_lines(lines(*printed)), []))
    assert writers == [("a", 0), ("b", 1), ("c", 2), ("s", None)]
    assert (rows, none) == ([(3, "out", "x", [[0, 2]], 1.0), (4, "err", "y", [[3, 3]], 4.0)], [])
