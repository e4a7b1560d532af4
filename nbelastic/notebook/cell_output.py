"""Shows the output and errors of cells that run on workers, and the SyntaxError of a cell."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

from IPython.display import display

from nbelastic.client.cell_syntax import describe_error
from nbelastic.errors import JobError, UsageError
from nbelastic.protocol.requests import CommitOutput
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


def show_output(outputs: Iterable[tuple[str, str, str, str | None]], noun: str = "workers") -> None:
    """Print each line after the names of the workers that printed it, then raise the errors, equal ones once.

    Equal output of several workers is printed once.
    """
    rows = list(outputs)
    for workers, (out, err) in _group_equal((row[0], row[1:3]) for row in rows):
        for text, stream in ((out, sys.stdout), (err, sys.stderr)):
            _print_lines(_names(workers, len(rows), noun), text, stream)
    errors = _group_equal((row[0], row[3]) for row in rows if row[3] is not None)
    if errors:
        (first, text), *others = errors
        count = sum(len(workers) for workers, _ in errors)
        for workers, other in others[:MAX_OTHER_ERRORS]:
            text += f"\n\n{_names(workers, len(rows), noun)} raised:\n\n{other}"
        if others[MAX_OTHER_ERRORS:]:
            left = sum(len(workers) for workers, _ in others[MAX_OTHER_ERRORS:])
            text += f"\n\n{left} more {noun} raised other errors."
        summary = f"the cell raised on {count} of {len(rows)} {noun}; {_names(first, len(rows), noun)} raised:"
        raise JobError(summary, worker=first[0], remote_traceback=text)


def show_commit_output(outputs: Sequence[CommitOutput]) -> None:
    """Show what a cell has printed and displayed at a commit, equal output of several ranks once; then raise its errors."""
    rows = [(f"rank {one.rank}", one.stdout, one.stderr, one.error) for one in outputs]
    displayed = _group_equal((f"rank {one.rank}", one.displays) for one in outputs if one.displays)
    try:
        show_output(rows, "ranks")
    finally:
        for ranks, displays in displayed:
            for data, metadata in map(json.loads, displays):
                _display(_names(ranks, len(rows), "ranks"), data, metadata)


def _display(names: str, data: dict[str, str], metadata: dict[str, Any]) -> None:
    """Show a MIME bundle after the names of the ranks: text as text, all other kinds as IPython shows them."""
    if data.keys() == {"text/plain"}:
        _print_lines(names, data["text/plain"], sys.stdout)
    else:
        print(f"[{names}]")
        display(data, metadata=metadata, raw=True)


def _print_lines(names: str, text: str, stream: TextIO) -> None:
    for line in text.removesuffix("\n").split("\n") if text else ():
        print(f"[{names}] {as_displayed(line)}", file=stream)


def _group_equal(outputs: Iterable[tuple[str, T]]) -> list[tuple[list[str], T]]:
    """Group workers by equal output, in the order of the first worker of each group."""
    groups: dict[T, list[str]] = {}
    for worker, output in outputs:
        groups.setdefault(output, []).append(worker)
    return [(workers, output) for output, workers in groups.items()]


def _names(workers: Sequence[str], count: int, noun: str) -> str:
    """Name these workers or ranks out of `count`."""
    if len(workers) == count and count > 1:
        return f"all {count} {noun}"
    more = f" and {len(workers) - MAX_NAMES} more" if len(workers) > MAX_NAMES else ""
    return ", ".join(workers[:MAX_NAMES]) + more


def cell_id(shell: Any) -> str | None:
    """Return the notebook's id of the running cell; None if there is no notebook, as in a terminal."""
    parent: dict[str, Any] = getattr(shell, "get_parent", dict)() or {}
    found = (parent.get("metadata") or {}).get("cellId")
    return str(found) if found else None
