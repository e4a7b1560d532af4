"""Running a job's program (a cell or a function) in the engine: its output, its value, its error."""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ipyparallel.serialize import unpack_apply_message
from IPython.core.getipython import get_ipython

from nbelastic.core.errors import JobStoppedError
from nbelastic.worker import boot
from nbelastic.worker.elastic import frameworks
from nbelastic.worker.session import Session, current

Checkpoints = tuple[str, int, int] | None  # the folder, commits between two, how many are kept
Outcome = tuple[str, Any, str]  # ("ok", value, "") or ("error", summary, traceback)

_newest: tuple[str, Outcome | None] = ("", None)  # the last program's job, and what became of it


class _Stream(io.TextIOBase):
    """Writes to the worker's log file at once, and to the notebook with the link's next tick."""

    encoding = "utf-8"

    def __init__(self, session: Session, name: str, fd: int) -> None:
        self._session, self._name, self._fd = session, name, fd
        self._file = open(fd, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115

    def write(self, text: str) -> int:
        self._session.printed.write(self._name, text)
        return self._file.write(text)

    def flush(self) -> None:
        self._file.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd


def call(job: str, log_dir: str, checkpoints: Checkpoints, *parts: memoryview) -> Outcome:
    """Run a function as the program of `job`. `parts`: the pickled call; it is unpickled here."""
    return _run(job, log_dir, checkpoints, lambda: _apply(parts))


def run_cell(job: str, log_dir: str, checkpoints: Checkpoints, source: str) -> Outcome:
    """Run a notebook cell as the program of `job`, in the engine's own namespace; its last expression is its value."""
    return _run(job, log_dir, checkpoints, lambda: _execute(job, source))


def outcome(job: str) -> Outcome:
    """What became of the newest program, for who did not hear it: it is kept until the next one begins.

    `("none", None, "")` if that was not the program of `job`, which has not begun here then. As all calls it waits for its
    turn: a program that runs has ended by then.
    """
    newest, kept = _newest
    return kept if newest == job and kept is not None else ("none", None, "")


def _run(job: str, log_dir: str, checkpoints: Checkpoints, program: Callable[[], Any]) -> Outcome:
    global _newest
    if (
        _newest[0] == job and _newest[1] is not None
    ):  # a driver that came meanwhile could not know that it was on its way
        return _newest[1]
    _newest = (job, None)
    found = _outcome(job, log_dir, checkpoints, program)
    _newest = (job, found)
    return found


def _outcome(job: str, log_dir: str, checkpoints: Checkpoints, program: Callable[[], Any]) -> Outcome:
    session = current()
    boot.redirect(Path(log_dir), str(session.worker))
    with _output(session):
        try:
            session.begin(job)
            frameworks().begin()
            _plan(session, checkpoints)
            return "ok", program(), ""
        except BaseException as error:  # noqa: BLE001  (whatever it is, it ends the program and not the worker)
            text = "" if isinstance(error, JobStoppedError) else _describe(error)
            print(text or f"stopped: {error}", file=sys.stderr)
            return "error", _summary(error), text
        finally:
            if session.checkpoints is not None:
                session.checkpoints.finish()
            session.finish()


def _plan(session: Session, checkpoints: Checkpoints) -> None:
    """The job's checkpoints, if there are to be any. StateError if they cannot be written."""
    if checkpoints is None:
        return
    from nbelastic.worker.saving import Plan

    plan = Plan(*checkpoints, speaks=lambda: session.speaks)
    plan.prepare()
    session.checkpoints = plan


@contextlib.contextmanager
def _output(session: Session) -> Iterator[None]:
    out, err = _Stream(session, "out", 1), _Stream(session, "err", 2)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield
    out.flush()
    err.flush()


def _apply(parts: Sequence[memoryview]) -> Any:
    function, args, kwargs = unpack_apply_message(parts, get_ipython().user_ns, copy=False)
    return function(*args, **kwargs)


def _execute(job: str, source: str) -> Any:
    shell = get_ipython()
    filename = f"<{job}>"
    code = shell.transform_cell(source)
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    tree = ast.parse(code, filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, filename, "exec"), shell.user_ns)  # noqa: S102  (the user's own cell is what we are for)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), filename, "eval"), shell.user_ns)  # noqa: S307


def _summary(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"SystemExit: the program called sys.exit({error.code!r})"
    text = traceback.format_exception_only(error)[-1].strip()
    return _printable(text if len(text) < 500 else f"{text[:500]}…")


def _describe(error: BaseException) -> str:
    """The traceback from the user's first line on: our own frames and what surrounds them help nobody."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent)
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)] or list(frames)
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(theirs)]
    return _printable("".join(lines + traceback.format_exception_only(error)))


def _printable(text: str) -> str:
    """Without what no file and no message can hold: lone surrogates, as in strange file names."""
    return text.encode(errors="replace").decode()
