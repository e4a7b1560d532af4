"""Folds equal lines of several workers into one, so that a view receives them once and not once per rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import Struct

from nbelastic.notebook.dashboard_contract import OutputLine, Writer
from nbelastic.protocol.output_buffer import Line

CLOSE = 200  # equal lines of different workers are folded within so many lines; log_fold.js has the same rule


class Folded(Struct):
    """A line and all workers that printed it; `number` is that of the newest, `time` that of the first."""

    number: int
    stream: str
    text: str
    writers: list[Writer]
    time: float = 0.0


def fold_lines(lines: Iterable[tuple[str, Line]], most: float = float("inf")) -> list[Folded]:
    """Fold equal lines of different workers that are close together. The order of each worker's lines is kept.

    Before a line that would be one more than `most`, it stops: the folded lines have as many writers as lines were read.
    """
    folded: list[Folded] = []
    last: dict[str, int] = {}  # for each worker, its last folded line
    places: dict[tuple[str, str], deque[int]] = {}  # for each stream and text, its folded lines
    for worker, line in lines:
        known = places.setdefault((line.stream, line.text), deque())
        first = max(last.get(worker, -1) + 1, len(folded) - CLOSE)
        at = next((place for place in known if place >= first), None)
        if at is None and len(folded) == most:
            break
        if at is None:
            at = len(folded)
            known.append(at)
            while known[0] < at - CLOSE:
                known.popleft()
            folded.append(Folded(line.number, line.stream, line.text, [], line.time))
        folded[at].writers.append(Writer(worker, line.rank))
        folded[at].number = max(folded[at].number, line.number)
        last[worker] = at
    return folded


def pack_lines(groups: Sequence[Sequence[Folded]]) -> tuple[list[Writer], list[list[OutputLine]]]:
    """Return all writers once, and the lines of each group. A line names its writers by runs of their places."""
    writers = sorted({w for lines in groups for line in lines for w in line.writers}, key=_by_rank)
    place = {writer: i for i, writer in enumerate(writers)}
    rows = [
        [
            OutputLine(line.number, line.stream, line.text, _runs([place[w] for w in line.writers]), line.time)
            for line in lines
        ]
        for lines in groups
    ]
    return writers, rows


def _by_rank(writer: Writer) -> tuple[bool, int, str]:
    worker, rank = writer
    return rank is None, rank or 0, worker


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs
