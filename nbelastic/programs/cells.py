"""Runs a cell between programs in this worker's IPython, and returns its output and its error as IPython shows it."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from IPython.core.getipython import get_ipython

from nbelastic.protocol import worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.worker.output_buffer import OutputStream, printable

MAX_TEXT = 50_000  # last characters of each stream, and of the traceback, that are sent
MAX_ERROR = 500  # characters of an error in one line
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PROMPT = re.compile(r"^( *)Cell In\[\d+\]", re.MULTILINE)  # the engine's count, which differs between workers
_RULE = re.compile(r"\A-+\n")


async def run(worker: WorkerId, cell: worker_messages.Cell) -> worker_messages.CellResult:
    """Run the cell, which may use `await` outside of functions."""
    out: list[str] = []
    err: list[str] = []
    with (
        contextlib.redirect_stdout(OutputStream(out.append, 1)),
        contextlib.redirect_stderr(OutputStream(err.append, 2)),
    ):
        try:
            error, traceback = await _run(cell.source)
        except BaseException as failed:  # noqa: BLE001  (the driver waits for an answer)
            error = traceback = _in_one_line(failed)
        sys.stdout.flush()
        sys.stderr.flush()
    return worker_messages.CellResult(worker, cell.number, *map(_end, ("".join(out), "".join(err), error, traceback)))


async def _run(source: str) -> tuple[str, str]:
    """The error in one line, and its traceback; both are empty without an error."""
    shell = get_ipython()
    before = None
    try:
        code = shell.transform_cell(source)
    except Exception:  # noqa: BLE001  (IPython shows it as the cell's error)
        code, before = source, sys.exc_info()
    with _collected_tracebacks(shell) as shown:
        if shell.should_run_async(source, transformed_cell=code, preprocessing_exc_tuple=before):
            result = await shell.run_cell_async(
                source, store_history=False, transformed_cell=code, preprocessing_exc_tuple=before
            )
        else:
            result = shell.run_cell(source, store_history=False)
    error = result.error_before_exec or result.error_in_exec
    if error is None:
        return "", ""
    line = _in_one_line(error)
    text = _COLOURS.sub("", "\n".join(shown)).strip()
    return line, _PROMPT.sub(r"\1Cell", _RULE.sub("", text)) or line


@contextlib.contextmanager
def _collected_tracebacks(shell: Any) -> Iterator[list[str]]:
    """Collect the lines of tracebacks instead of showing them."""
    shown: list[str] = []
    shell._showtraceback = lambda _type, _value, lines: shown.extend(lines)
    try:
        yield shown
    finally:
        del shell._showtraceback


def _in_one_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (the user's own class)
        text = "an error that cannot be shown"
    return f"{type(error).__name__}: {text}"[:MAX_ERROR]


def _end(text: str) -> str:
    text = printable(text)
    left = len(text) - MAX_TEXT
    return text if left <= 0 else f"… {left} characters are only in the log file …\n{text[left:]}"
