"""Runs a cell in this worker's IPython, and returns its output and its error as IPython shows it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.getipython import get_ipython

from nbelastic.programs.cell_interrupts import CellInterrupts
from nbelastic.programs.forked_children import end_forked_children
from nbelastic.protocol import cell_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.worker.cell_pieces import shortened
from nbelastic.worker.output_buffer import OutputStream, printable

MAX_TEXT = 50_000  # last characters of each stream, and of the traceback, that are sent
MAX_DISPLAY = 1_000_000  # bytes of one displayed object in its message; the driver takes no longer one
MAX_ERROR = 500  # characters of an error in one line
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PROMPT = re.compile(r"^( *)Cell In\[\d+\]", re.MULTILINE)  # the engine's count, which differs between workers
_RULE = re.compile(r"\A-+\n")


async def run(
    worker: WorkerId,
    cell: cell_messages.Cell,
    put: Callable[[int, str, str], object],
    interrupts: CellInterrupts,
) -> cell_messages.CellResult:
    """Run the cell, which may use `await` outside of functions, and `put` all that it prints and displays at once.

    `put(number, kind, text)` takes a `CellPiece`. An interrupt raises KeyboardInterrupt in the cell.
    """
    shell, show = get_ipython(), partial(put, cell.number, "display")
    with _collected_output(partial(put, cell.number)) as output, _captured_displays(shell, show):
        try:
            with _collected_tracebacks(shell) as shown, end_forked_children() as end_child:
                result = await _run(shell, cell, interrupts)
                end_child(_raised(result))
                error, traceback = _outcome(shell, result, shown, show)
        except BaseException as failed:  # noqa: BLE001  (the driver waits for an answer)
            error = traceback = _in_one_line(failed)
    return _result(worker, cell.number, output, error, traceback)


def run_at_commit(
    worker: WorkerId,
    cell: cell_messages.CommitCell,
    put: Callable[[int, str, str], object],
    limited: AbstractContextManager[None],
) -> cell_messages.CellResult:
    """Run the cell in the main thread, in the middle of a program, and `put` all that it prints and displays at once.

    `limited` may raise while the user's code runs inside it.
    """
    shell, show = get_ipython(), partial(put, cell.number, "display")
    with (
        _collected_output(partial(put, cell.number)) as output,
        _captured_displays(shell, show),
        _forgotten_results(shell),
    ):
        try:
            with _collected_tracebacks(shell) as shown, limited, end_forked_children() as end_child:
                result = shell.run_cell(cell.source, store_history=False)
                end_child(_raised(result))
                error, traceback = _outcome(shell, result, shown, show)
            result.result = None
        except BaseException as failed:  # noqa: BLE001  (the driver waits for an answer)
            error = traceback = _in_one_line(failed)
    return _result(worker, cell.number, output, error, traceback)


@contextlib.contextmanager
def _collected_output(put: Callable[[str, str], object]) -> Iterator[tuple[list[str], list[str]]]:
    """Collect what is printed, and `put(stream, text)` it at once."""
    out: list[str] = []
    err: list[str] = []

    def taker(stream: str, texts: list[str]) -> Callable[[str], None]:
        def take(text: str) -> None:
            texts.append(text)
            put(stream, text)

        return take

    streams = OutputStream(taker("out", out), 1), OutputStream(taker("err", err), 2)
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        yield out, err
    for stream in streams:  # not `sys.stdout`: the cell may have set that
        stream.flush()


def _result(
    worker: WorkerId, number: int, output: tuple[list[str], list[str]], error: str, traceback: str
) -> cell_messages.CellResult:
    out, err = map("".join, output)
    return cell_messages.CellResult(worker, number, _end(out), _end(err), _end(error), _end(traceback))


async def _run(shell: Any, cell: cell_messages.Cell, interrupts: CellInterrupts) -> Any:
    """IPython's result of the cell."""
    source, before = cell.source, None
    try:
        code = shell.transform_cell(source)
    except Exception:  # noqa: BLE001  (IPython shows it as the cell's error)
        code, before = source, sys.exc_info()
    if not shell.should_run_async(source, transformed_cell=code, preprocessing_exc_tuple=before):
        with interrupts.running(cell.number, _interrupt):
            return shell.run_cell(source, store_history=False)
    call = shell.run_cell_async(source, store_history=False, transformed_cell=code, preprocessing_exc_tuple=before)
    loop = asyncio.get_running_loop()
    task = loop.create_task(_awaited(call))

    def end(_: bool) -> None:
        if asyncio.current_task() is task:
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(task.cancel)  # the cell awaits something; an error here would end the event loop

    with interrupts.running(cell.number, end):
        result = await task
    shell.events.trigger("post_execute")  # which shows figures; `run_cell` does it itself
    if isinstance(result, BaseException):
        raise result
    return result


async def _awaited(call: Awaitable[Any]) -> Any:
    """The result, or the error: the event loop would end with a KeyboardInterrupt that leaves a task."""
    try:
        return await call
    except BaseException as error:  # noqa: BLE001
        return error


def _interrupt(_: bool) -> NoReturn:
    raise KeyboardInterrupt


def _outcome(shell: Any, result: Any, shown: list[str], show: Callable[[str], object]) -> tuple[str, str]:
    """Show the cell's last value, unless a `;` follows. Returns its error in one line, and the traceback; both may be empty."""
    is_hidden = result.result is None or shell.displayhook.semicolon_at_end_of_expression(
        shell.transform_cell(result.info.raw_cell)
    )
    bundle = () if is_hidden else shell.display_formatter.format(result.result)
    error, traceback = _error_of(result, shown)
    if not error and bundle and not bundle[0]:  # its __repr__ has raised
        error = traceback = _COLOURS.sub("", "\n".join(shown)).strip()
    elif not error and bundle:
        show(_encoded(*bundle))
    return error, traceback


def _raised(result: Any) -> BaseException | None:
    """What the cell has raised, if anything: its syntax may be wrong."""
    error: BaseException | None = result.error_before_exec or result.error_in_exec
    return error


def _error_of(result: Any, shown: list[str]) -> tuple[str, str]:
    """The cell's error in one line, and its traceback as IPython has shown it; both are empty without an error."""
    error = _raised(result)
    if error is None:
        return "", ""
    line = _in_one_line(error)
    text = _COLOURS.sub("", "\n".join(shown)).strip()
    return line, _PROMPT.sub(r"\1Cell", _RULE.sub("", text)) or line


class _Publisher(CapturingDisplayPublisher):  # type: ignore[misc]  # IPython carries no types here
    """Shows what is displayed with a function, instead of publishing it."""

    show: Callable[[str], object]

    def publish(self, data: dict[str, Any], metadata: dict[str, Any] | None = None, **_: object) -> None:
        self.show(_encoded(data, metadata or {}))


@contextlib.contextmanager
def _captured_displays(shell: Any, show: Callable[[str], object]) -> Iterator[None]:
    """Call `show` with each MIME bundle that the cell displays, figures of matplotlib included."""
    publisher, shell.display_pub = shell.display_pub, _Publisher()
    shell.display_pub.show = show
    hook, shell.displayhook.finish_displayhook = shell.displayhook.finish_displayhook, lambda: None
    try:
        yield
    finally:
        shell.display_pub, shell.displayhook.finish_displayhook = publisher, hook


def _encoded(data: dict[str, Any], metadata: dict[str, Any]) -> str:
    """A MIME bundle as JSON. Only its text, and why, if it is too long for a message."""
    pictures = {kind: b64encode(value).decode() for kind, value in data.items() if isinstance(value, bytes)}
    texts = {kind: value if kind != "text/plain" else _end(value) for kind, value in data.items()}
    text = json.dumps([{**texts, **pictures}, metadata], default=str)
    size = len(json.dumps(text))
    if size > MAX_DISPLAY:
        why = f"not displayed: it has {size / 1e6:.1f} MB, and at most {MAX_DISPLAY / 1e6:g} MB are sent"
        text = json.dumps([{"text/plain": f"{texts.get('text/plain', '')}\n({why})".lstrip()}, {}])
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
    return shortened(text, MAX_TEXT)
