"""Shows the output and errors of cells that run on workers, and the SyntaxError of a cell."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from nbelastic.client.cell_syntax import describe_error
from nbelastic.errors import JobError, UsageError
from nbelastic.system.terminal_text import as_displayed

T = TypeVar("T")
MAX_NAMES = 4  # workers named before a line; the others are counted
MAX_OTHER_ERRORS = 2  # different errors that are shown after the first


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


def show_output(outputs: Iterable[tuple[str, str, str, str | None]]) -> None:
    """Print each line after the names of the workers that printed it, then raise the errors, equal ones once.

    Equal output of several workers is printed once.
    """
    rows = list(outputs)
    for workers, (out, err) in _group_equal((row[0], row[1:3]) for row in rows):
        for text, stream in ((out, sys.stdout), (err, sys.stderr)):
            for line in text.removesuffix("\n").split("\n") if text else ():
                print(f"[{_names(workers, len(rows))}] {as_displayed(line)}", file=stream)
    errors = _group_equal((row[0], row[3]) for row in rows if row[3] is not None)
    if errors:
        (first, text), *others = errors
        count = sum(len(workers) for workers, _ in errors)
        for workers, other in others[:MAX_OTHER_ERRORS]:
            text += f"\n\n{_names(workers, len(rows))} raised:\n\n{other}"
        if others[MAX_OTHER_ERRORS:]:
            text += (
                f"\n\n{sum(len(workers) for workers, _ in others[MAX_OTHER_ERRORS:])} more workers raised other errors."
            )
        summary = f"the cell raised on {count} of {len(rows)} workers; {_names(first, len(rows))} raised:"
        raise JobError(summary, worker=first[0], remote_traceback=text)


def _group_equal(outputs: Iterable[tuple[str, T]]) -> list[tuple[list[str], T]]:
    """Group workers by equal output, in the order of the first worker of each group."""
    groups: dict[T, list[str]] = {}
    for worker, output in outputs:
        groups.setdefault(output, []).append(worker)
    return [(workers, output) for output, workers in groups.items()]


def _names(workers: Sequence[str], count: int) -> str:
    """Name these workers out of `count`."""
    if len(workers) == count and count > 1:
        return f"all {count} workers"
    more = f" and {len(workers) - MAX_NAMES} more" if len(workers) > MAX_NAMES else ""
    return ", ".join(workers[:MAX_NAMES]) + more


def cell_id(shell: Any) -> str | None:
    """Return the notebook's id of the running cell; None if there is no notebook, as in a terminal."""
    parent: dict[str, Any] = getattr(shell, "get_parent", dict)() or {}
    found = (parent.get("metadata") or {}).get("cellId")
    return str(found) if found else None
