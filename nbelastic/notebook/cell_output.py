"""What a notebook shows of cells that run on workers: output, errors, and a SyntaxError before anything is sent."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from nbelastic.client.cell_syntax import describe_error
from nbelastic.errors import JobError, UsageError
from nbelastic.system.terminal_text import shown

T = TypeVar("T")
NAMED = 4  # workers before a line; the others are counted
OTHERS = 2  # different errors that are shown beside the first


class CellSyntaxError(UsageError):
    """A cell cannot be compiled. IPython would show a SyntaxError of a magic below the frames of IPython and nbelastic."""

    def __init__(self, error: SyntaxError) -> None:
        super().__init__(describe_error(error))

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@contextmanager
def checked() -> Iterator[None]:
    """Show the SyntaxError of a cell by its line and its caret alone."""
    try:
        yield
    except SyntaxError as error:
        raise CellSyntaxError(error) from None


def show_output(outputs: Iterable[tuple[str, str, str, str | None]]) -> None:
    """Print each line after the names of the workers that printed it; then raise the errors, equal ones once.

    Workers with the same output share its lines.
    """
    rows = list(outputs)
    for workers, (out, err) in _alike((row[0], row[1:3]) for row in rows):
        for text, stream in ((out, sys.stdout), (err, sys.stderr)):
            for line in text.removesuffix("\n").split("\n") if text else ():
                print(f"[{_names(workers, len(rows))}] {shown(line)}", file=stream)
    errors = _alike((row[0], row[3]) for row in rows if row[3] is not None)
    if errors:
        (first, text), *others = errors
        count = sum(len(workers) for workers, _ in errors)
        for workers, other in others[:OTHERS]:
            text += f"\n\n{_names(workers, len(rows))} raised:\n\n{other}"
        if others[OTHERS:]:
            text += f"\n\n{sum(len(workers) for workers, _ in others[OTHERS:])} more workers raised other errors."
        summary = f"the cell raised on {count} of {len(rows)} workers; {_names(first, len(rows))} raised:"
        raise JobError(summary, worker=first[0], remote_traceback=text)


def _alike(said: Iterable[tuple[str, T]]) -> list[tuple[list[str], T]]:
    """The workers of each thing that was said, in the order of the first of each."""
    groups: dict[T, list[str]] = {}
    for worker, what in said:
        groups.setdefault(what, []).append(worker)
    return [(workers, what) for what, workers in groups.items()]


def _names(workers: Sequence[str], count: int) -> str:
    """Of some among `count` workers."""
    if len(workers) == count and count > 1:
        return f"all {count} workers"
    more = f" and {len(workers) - NAMED} more" if len(workers) > NAMED else ""
    return ", ".join(workers[:NAMED]) + more


def cell_id(shell: Any) -> str | None:
    """The notebook's id of the cell that runs now; None where there is none, as in a terminal."""
    parent: dict[str, Any] = getattr(shell, "get_parent", dict)() or {}
    found = (parent.get("metadata") or {}).get("cellId")
    return str(found) if found else None
