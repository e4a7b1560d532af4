"""Runs a cell in this worker's IPython, and returns its output and its error as IPython shows it."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.getipython import get_ipython
from msgspec.structs import replace

from nbelastic.protocol import worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.worker.output_buffer import OutputStream, printable

MAX_TEXT = 50_000  # last characters of each stream, and of the traceback, that are sent
MAX_DISPLAY = 4_000_000  # characters of one displayed object that are sent
MAX_ERROR = 500  # characters of an error in one line
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PROMPT = re.compile(r"^( *)Cell In\[\d+\]", re.MULTILINE)  # the engine's count, which differs between workers
_RULE = re.compile(r"\A-+\n")


async def run(worker: WorkerId, cell: worker_messages.Cell) -> worker_messages.CellResult:
    """Run the cell, which may use `await` outside of functions."""
    with _collected_output() as output:
        try:
            error, traceback = await _run(cell.source)
        except BaseException as failed:  # noqa: BLE001  (the driver waits for an answer)
            error = traceback = _in_one_line(failed)
    return _result(worker, cell.number, output, error, traceback)


def run_at_commit(
    worker: WorkerId, number: int, source: str, limited: AbstractContextManager[None]
) -> worker_messages.CellResult:
    """Run the cell in the main thread, in the middle of a program. Also returns what it displays, and its last value.

    `limited` may raise while the user's code runs inside it.
    """
    shell, displays, value = get_ipython(), list[str](), list[str]()
    with _collected_output() as output, _collected_displays(shell, displays), _forgotten_results(shell):
        try:
            with _collected_tracebacks(shell) as shown, limited:
                result = shell.run_cell(source, store_history=False)
                bundle = () if result.result is None else shell.display_formatter.format(result.result)
            error, traceback = _error_of(result, shown)
            if not error and bundle and not bundle[0]:  # its __repr__ has raised
                error = traceback = _COLOURS.sub("", "\n".join(shown)).strip()
            elif not error and bundle:
                value.append(_encoded(*bundle))
            result.result = None
        except BaseException as failed:  # noqa: BLE001  (the driver waits for an answer)
            error = traceback = _in_one_line(failed)
    return replace(_result(worker, number, output, error, traceback), displays=(*displays, *value))


@contextlib.contextmanager
def _collected_output() -> Iterator[tuple[list[str], list[str]]]:
    out: list[str] = []
    err: list[str] = []
    with (
        contextlib.redirect_stdout(OutputStream(out.append, 1)),
        contextlib.redirect_stderr(OutputStream(err.append, 2)),
    ):
        yield out, err
        sys.stdout.flush()
        sys.stderr.flush()


def _result(
    worker: WorkerId, number: int, output: tuple[list[str], list[str]], error: str, traceback: str
) -> worker_messages.CellResult:
    out, err = map("".join, output)
    return worker_messages.CellResult(worker, number, _end(out), _end(err), _end(error), _end(traceback))


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
    return _error_of(result, shown)


def _error_of(result: Any, shown: list[str]) -> tuple[str, str]:
    """The cell's error in one line, and its traceback as IPython has shown it; both are empty without an error."""
    error = result.error_before_exec or result.error_in_exec
    if error is None:
        return "", ""
    line = _in_one_line(error)
    text = _COLOURS.sub("", "\n".join(shown)).strip()
    return line, _PROMPT.sub(r"\1Cell", _RULE.sub("", text)) or line


@contextlib.contextmanager
def _collected_displays(shell: Any, displays: list[str]) -> Iterator[None]:
    """Collect what the cell displays, figures of matplotlib included, instead of publishing it."""
    published = CapturingDisplayPublisher()
    publisher, shell.display_pub = shell.display_pub, published
    hook, shell.displayhook.finish_displayhook = shell.displayhook.finish_displayhook, lambda: None
    try:
        yield
    finally:
        shell.display_pub, shell.displayhook.finish_displayhook = publisher, hook
        displays += [_encoded(each["data"], each["metadata"]) for each in published.outputs]


def _encoded(data: dict[str, Any], metadata: dict[str, Any]) -> str:
    """A MIME bundle as JSON. Without its pictures if it is too long for a message."""
    pictures = {kind: b64encode(value).decode() for kind, value in data.items() if isinstance(value, bytes)}
    texts = {kind: value if kind != "text/plain" else _end(value) for kind, value in data.items()}
    for bundle in ({**texts, **pictures}, {"text/plain": texts.get("text/plain", "")}):
        text = json.dumps([bundle, metadata], default=str)
        if len(text) <= MAX_DISPLAY:
            break
    return printable(text)


@contextlib.contextmanager
def _forgotten_results(shell: Any) -> Iterator[None]:
    """Keep no value and no traceback of the cell alive: they may refer to the process group of this generation."""
    names, before = shell.user_ns, {name: value for name, value in shell.user_ns.items() if name.startswith("_")}
    yield
    for name in [name for name in names if name.startswith("_")]:
        del names[name]
    names.update(before)
    shell.displayhook._ = shell.displayhook.__ = shell.displayhook.___ = ""
    names.get("_oh", {}).clear()
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)


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
