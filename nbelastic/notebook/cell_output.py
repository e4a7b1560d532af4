"""Shows the output and errors of cells that run on workers, and the SyntaxError of a cell."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from IPython.display import display

from nbelastic.client.cell_syntax import describe_error
from nbelastic.client.progress import ProgressLine, changing_line
from nbelastic.errors import JobError, UsageError
from nbelastic.notebook.live_output import LiveOutput, Shown
from nbelastic.protocol.requests import CellOutput, CommitOutput, Piece
from nbelastic.system.terminal_text import as_displayed

MAX_NAMES = 4  # workers, or runs of ranks, that are named before a line; the others are counted
MAX_LIVE = 8  # lines without an end that are shown at once
MAX_OTHER_ERRORS = 2  # different errors that are shown after the first
_RANK = re.compile(r"rank (\d+)")


class CellSyntaxError(UsageError):
    """A cell cannot be compiled. Unlike a SyntaxError, IPython shows it without the frames of IPython and nbelastic."""

    def __init__(self, error: SyntaxError) -> None:
        super().__init__(describe_error(error))

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@contextmanager
def short_syntax_errors() -> Iterator[None]:
    """Show the SyntaxError of a cell as its line and caret only."""
    try:
        yield
    except SyntaxError as error:
        raise CellSyntaxError(error) from None


class CellDisplay:
    """Shows what a cell prints and displays on `workers`, equal output of several once, while it runs.

    For the main thread. It prints each line after the names of the workers that have printed it. Lines without an end, such as
    progress bars, change in place.
    """

    def __init__(self, workers: Sequence[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._output, self._clock = LiveOutput(workers), clock
        self._live: list[str] = []  # lines without an end
        self._line = ProgressLine(lambda: "\n".join(self._live), changing_line(), clock)

    def update(self, pieces: Iterable[Piece] = ()) -> None:
        """Take pieces of output, and show what has waited long enough."""
        now = self._clock()
        for piece in pieces:
            worker = piece.worker if piece.rank is None else f"rank {piece.rank}"
            self._output.add(worker, piece.kind, piece.text, now)
        self._show(self._output.take(now))
        self._show_live(now)

    def end(self) -> None:
        """Show the rest."""
        self._line.clear()
        self._show(self._output.take_rest())

    def _show_live(self, now: float) -> None:
        rows, before, count = self._output.live(now), self._live, len(self._output.workers)
        self._live = [f"[{_names(workers, count)}] {text}" for workers, text in rows[:MAX_LIVE]]
        if rows[MAX_LIVE:]:
            self._live.append(f"… {len(rows) - MAX_LIVE} more lines without an end …")
        if self._live:
            self._line.show()
        elif before:
            self._line.clear()

    def _show(self, found: Iterable[Shown]) -> None:
        count = len(self._output.workers)
        for (workers, kind), group in groupby(found, lambda one: (one.workers, one.kind)):
            self._line.make_room()
            names, texts = _names(workers, count), [one.text for one in group]
            if kind == "display":
                for text in texts:
                    _display(names, *json.loads(text))
            else:
                _print_lines(names, texts, kind)


def raise_errors(rows: Sequence[CellOutput] | Sequence[CommitOutput]) -> None:
    """Raise the errors of a cell as one JobError, equal ones once. Without errors nothing happens."""
    groups: dict[str, list[str]] = {}
    noun = "workers"
    for row in rows:
        if isinstance(row, CommitOutput):
            noun, name, error = "ranks", f"rank {row.rank}", row.error
        else:
            name, _, _, error = row
        if error is not None:
            groups.setdefault(error, []).append(name)
    if not groups:
        return
    (text, first), *others = groups.items()
    for other, workers in others[:MAX_OTHER_ERRORS]:
        text += f"\n\n{_names(workers, len(rows))} raised:\n\n{other}"
    if others[MAX_OTHER_ERRORS:]:
        left = sum(len(workers) for _, workers in others[MAX_OTHER_ERRORS:])
        text += f"\n\n{left} more {noun} raised other errors."
    count = sum(map(len, groups.values()))
    summary = f"the cell raised on {count} of {len(rows)} {noun}; {_names(first, len(rows))} raised:"
    raise JobError(summary, worker=first[0], remote_traceback=text)


def _display(names: str, data: dict[str, str], metadata: dict[str, Any]) -> None:
    """Show a MIME bundle after the names of the workers: text as text, all other kinds as IPython shows them."""
    if data.keys() == {"text/plain"}:
        _print_lines(names, data["text/plain"].split("\n"), "out")
    else:
        print(f"[{names}]")
        display(data, metadata=metadata, raw=True)


def _print_lines(names: str, lines: Iterable[str], kind: str) -> None:
    """Print the lines with one write, which makes one message to the notebook."""
    text = "".join(f"[{names}] {as_displayed(line)}\n" for line in lines)
    stream = sys.stdout if kind == "out" else sys.stderr
    stream.write(text)
    stream.flush()


def _names(workers: Sequence[str], count: int) -> str:
    """Name these workers or ranks out of `count`: `all 8 workers`, `a/0#1, a/1#1`, `ranks 0-3, 6`."""
    ranks = [int(found[1]) for worker in workers if (found := _RANK.fullmatch(worker))]
    if len(ranks) == len(workers):
        word, names = ("rank " if len(ranks) == 1 else "ranks "), _runs(sorted(ranks))
    elif len(workers) == count and count > 1:
        return f"all {count} workers"
    else:
        word, names = "", list(workers)
    left = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return word + ", ".join(names[:MAX_NAMES]) + left


def _runs(numbers: Sequence[int]) -> list[str]:
    """`0-3`, `6` for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def cell_id(shell: Any) -> str | None:
    """Return the notebook's id of the running cell; None if there is no notebook, as in a terminal."""
    parent: dict[str, Any] = getattr(shell, "get_parent", dict)() or {}
    found = (parent.get("metadata") or {}).get("cellId")
    return str(found) if found else None
