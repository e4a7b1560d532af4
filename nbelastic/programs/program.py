"""Running programs (a job's cell or function) and cells in this worker's main thread: their output, values and errors."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from IPython.core.getipython import get_ipython

from nbelastic.errors import JobStoppedError
from nbelastic.programs import cells
from nbelastic.programs.elastic import frameworks
from nbelastic.protocol import messages, worker_messages
from nbelastic.state.checkpoints import Plan
from nbelastic.system import pickling
from nbelastic.system.files import replace_private
from nbelastic.worker.environment import log_to
from nbelastic.worker.output_buffer import OutputStream, printable
from nbelastic.worker.session import Session

LOOK = 0.25  # seconds between looks at whether the job is over, while its call is fetched
AGAIN = 5.0  # seconds after which a piece of the call that has not come is asked for again
PATIENCE = 60.0  # seconds without a piece after which the program fails
ERROR_BOUND = 500  # characters of an error's text
BOUND = 100_000  # characters of a traceback: the end of it


class Outcome(NamedTuple):
    """`value` is packed; None if there is an `error` (one line, with its `traceback`)."""

    value: list[memoryview] | None = None
    error: str = ""
    traceback: str = ""


def start_runner(session: Session, engine: str) -> asyncio.Task[None]:
    """From here on this worker, which is ipyparallel's `engine`, takes programs and cells. In the engine's event loop."""
    loop, runner = asyncio.get_running_loop(), Runner(session)
    serving = loop.create_task(runner.serve())
    session.hello(engine, lambda message: loop.call_soon_threadsafe(runner.take, message))
    return serving


class Runner:
    """Runs programs and cells one after the other, in the order in which they come. Lives in the engine's event loop."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._orders: asyncio.Queue[messages.Message] = asyncio.Queue()
        self._pieces: asyncio.Queue[worker_messages.CallPiece] = asyncio.Queue()
        self._newest = ""  # the last program's job

    def take(self, message: messages.Message) -> None:
        """A message of the driver's that concerns what runs here."""
        if isinstance(message, worker_messages.CallPiece):
            self._pieces.put_nowait(message)
        else:
            self._orders.put_nowait(message)

    async def serve(self) -> None:
        """For ever."""
        while True:
            match await self._orders.get():
                case worker_messages.Program(job=job) if (
                    job == self._newest
                ):  # a driver that came meanwhile could not know of it
                    self._session.repeat_result()
                case worker_messages.Program() as order:
                    self._newest = order.job
                    self._session.program_begins(order.job)
                    try:
                        result, value = self._result(order, await self._program(order))
                    except asyncio.CancelledError:  # this task is to end
                        raise
                    except BaseException as error:  # noqa: BLE001  (the driver has to hear of the end, whatever it was)
                        result, value = (
                            worker_messages.ProgramResult(self._session.worker, order.job, _summary(error)),
                            b"",
                        )
                    self._session.program_ended(result, value)
                case worker_messages.Cell() as cell:
                    self._session.link.send(await cells.run(self._session.worker, cell))

    async def _program(self, order: worker_messages.Program) -> Outcome:
        log_to(order.log_dir, str(self._session.worker))
        call = None if order.call is None else await self._fetched(order.job, order.call)
        return _run(self._session, order, call)

    async def _fetched(self, job: str, call: messages.Blob) -> pickling.Bytes:
        """The bytes of the call, wherever they are. OSError if they do not come; JobStoppedError if the job ends before."""
        if call.data:
            return bytearray(call.data)
        if call.path:
            return pickling.mapped(Path(call.path))
        while self._pieces.qsize():  # of another call
            self._pieces.get_nowait()
        data, at, now = bytearray(call.size), 0, asyncio.get_running_loop().time
        asked = came = -AGAIN
        while at < call.size:
            self._session.refuse_if_stopped(job)
            if self._session.link.disconnected or came < 0:
                came = now()
            if now() - came >= PATIENCE:
                raise OSError(f"the program did not come: {at} of {call.size} bytes, and nothing for {PATIENCE:g} s")
            if now() - max(asked, came) >= AGAIN or asked < 0:
                asked = now()
                self._session.link.send(worker_messages.FetchCall(self._session.worker, job, at))
            try:
                piece = await asyncio.wait_for(self._pieces.get(), LOOK)
            except TimeoutError:
                continue
            if piece.job == job and piece.offset == at:
                data[at : at + len(piece.data)] = piece.data
                at, came = at + len(piece.data), now()
                if at % (pickling.PIECES * pickling.PIECE) == 0:  # all have come that were asked for
                    asked = -AGAIN
        return data

    def _result(self, order: worker_messages.Program, outcome: Outcome) -> tuple[worker_messages.ProgramResult, bytes]:
        """What the driver is told, and what it will fetch. A long value goes into a file, if there is a folder with room."""
        blob, kept = None, b""
        if outcome.value is not None:
            size = pickling.size(outcome.value)
            path = Path(order.results) / f"{str(self._session.worker).replace('/', '-')}.{order.job}"
            if size <= pickling.INLINE:
                blob = messages.Blob(size, b"".join(outcome.value))
            elif order.results and _written(path, outcome.value):
                blob = messages.Blob(size, path=str(path))
            else:
                blob, kept = messages.Blob(size), b"".join(outcome.value)
        worker = self._session.worker
        return worker_messages.ProgramResult(worker, order.job, outcome.error, outcome.traceback, blob), kept


def _written(path: Path, value: list[memoryview]) -> bool:
    try:
        replace_private(path, value)
    except OSError:  # the disk is full: the driver fetches it, as from another machine
        return False
    return True


def _run(session: Session, order: worker_messages.Program, call: pickling.Bytes | None) -> Outcome:
    program: Callable[[], Any] = partial(_execute, order.job, order.source) if call is None else partial(_apply, call)
    with _output(session):
        try:
            session.begin(order.job)
            frameworks().begin()
            _plan(session, order.checkpoints)
            value = program()
        except BaseException as error:  # noqa: BLE001  (whatever it is, it ends the program and not the worker)
            text = "" if isinstance(error, JobStoppedError) else _describe(error)
            print(text or f"stopped: {error}", file=sys.stderr)
            return Outcome(error=_summary(error), traceback=text)
        finally:
            if session.checkpoints is not None:
                session.checkpoints.finish()
            session.finish()
        try:
            return Outcome(pickling.pack(value))
        except Exception as error:  # noqa: BLE001  (pickling fails in many ways)
            text = f"{type(error).__name__}: the result cannot be sent: {printable(str(error)[:ERROR_BOUND])}"
            print(text, file=sys.stderr)
            return Outcome(error=text)


def _plan(session: Session, checkpoints: tuple[str, int, int] | None) -> None:
    """The job's checkpoints, if there are to be any. StateError if they cannot be written."""
    if checkpoints is None:
        return
    plan = Plan(*checkpoints, speaks=lambda: session.speaks)
    plan.prepare()
    session.checkpoints = plan


@contextlib.contextmanager
def _output(session: Session) -> Iterator[None]:
    out, err = (OutputStream(partial(session.output.write, name), fd) for name, fd in (("out", 1), ("err", 2)))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield
    out.flush()
    err.flush()


def _apply(call: pickling.Bytes) -> Any:
    function, args, kwargs = pickling.unpack(call)
    _add_names(function, get_ipython().user_ns)
    return function(*args, **kwargs)


def _add_names(function: Any, namespace: Mapping[str, Any]) -> None:
    """A notebook's function finds what cells have defined on this worker, as far as the notebook has no such name."""
    while isinstance(function, partial):
        function = function.func
    plain = function if hasattr(inspect.unwrap(function), "__globals__") else type(function).__call__
    own = getattr(inspect.unwrap(plain), "__globals__", {})
    if own.get("__name__") == "__main__":
        for name, value in namespace.items():
            own.setdefault(name, value)


def _execute(job: str, source: str) -> Any:
    """The cell, in the engine's own namespace; its last expression is its value."""
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
    text = traceback.format_exception_only(error)[-1].strip() or "an error without a message"
    return printable(text if len(text) < ERROR_BOUND else f"{text[:ERROR_BOUND]}…")


def _describe(error: BaseException) -> str:
    """The traceback from the user's first line on: our own frames and what surrounds them help nobody."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)] or list(frames)
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(theirs)]
    return printable("".join(lines + traceback.format_exception_only(error))[-BOUND:])
