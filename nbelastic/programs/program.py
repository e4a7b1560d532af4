"""Runs programs (a job's cell or function) and cells in this worker's main thread."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import linecache
import queue
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from IPython.core.getipython import get_ipython

from nbelastic.errors import JobStoppedError
from nbelastic.ipp.engine import connect_engine
from nbelastic.programs import cells, state_pull
from nbelastic.programs.cell_interrupts import CellInterrupts
from nbelastic.programs.debugger import Breakpoints
from nbelastic.programs.elastic import frameworks
from nbelastic.programs.forked_children import end_forked_children
from nbelastic.programs.shell import printed_displays
from nbelastic.programs.tracebacks import MAX_ERROR, describe, summary
from nbelastic.programs.undefined_names import borrowed_names, explain_undefined_name, refuse_undefined_names
from nbelastic.programs.user_code import UserCode
from nbelastic.protocol import cell_messages, messages, worker_messages
from nbelastic.state.checkpoint_lock import folder_lock
from nbelastic.state.checkpoints import Plan
from nbelastic.system import pickling
from nbelastic.system.folder_paths import code_folder
from nbelastic.system.private_files import replace_private
from nbelastic.system.signal_safe_queue import SignalSafeQueue
from nbelastic.system.tunnel_folder import engine_connection
from nbelastic.worker.environment import log_to
from nbelastic.worker.output_buffer import OutputStream, printable
from nbelastic.worker.session import Session

POLL = 0.25  # seconds between two checks whether the job is over, while its call is fetched
REPEAT = 5.0  # seconds after which a missing piece of the call is requested again
FETCH_TIMEOUT = 60.0  # seconds without a piece after which the program fails


class Outcome(NamedTuple):
    """`value` is pickled; None if there is an `error` (one line, with its `traceback`)."""

    value: list[memoryview] | None = None
    error: str = ""
    traceback: str = ""


async def serve(session: Session, profile: str, tunnel: str) -> None:
    """Run programs and cells in this thread until the process ends. `profile`, `tunnel`: folders, for ipyparallel's engine."""
    runner = Runner(session, profile, tunnel)
    session.programs.run = runner.run_inside
    session.hello(runner.take)
    await runner.serve()


class Runner:
    """Runs programs and cells one after the other, as they arrive, in this thread's event loop."""

    def __init__(self, session: Session, profile: str, tunnel: str) -> None:
        self._session, self._loop = session, asyncio.get_running_loop()
        self._requests: asyncio.Queue[messages.Message] = asyncio.Queue()
        self._pieces: SignalSafeQueue[worker_messages.CallPiece] = SignalSafeQueue()
        self._newest_job = ""  # of the last program
        self._names_before: frozenset[str] = frozenset()  # of cells, before that job
        self._interrupts = CellInterrupts()
        self._breakpoints = Breakpoints(session)
        template = sys.modules.get("nbelastic.programs.template")
        self._profile, self._tunnel = profile, tunnel
        self._engine: asyncio.Task[None] | None = None  # connects this worker to ipyparallel's controller
        self._streams = asyncio.Lock()  # held by a cell, and by an engine's start: both replace streams and displays
        self._code = UserCode(code_folder(session.relay), getattr(template, "IMPORTED", {}))

    def take(self, message: messages.Message) -> None:
        """In any thread: queue a message of the driver for the task that runs programs, or act on it at once."""
        if isinstance(message, worker_messages.CallPiece):
            self._pieces.put(message)  # the main thread waits for it outside the event loop
        elif isinstance(message, worker_messages.NewProgram | worker_messages.KeepProgram):
            self._session.programs.note(message)
        elif isinstance(message, worker_messages.DebuggerInput):
            self._breakpoints.take(message)
        elif isinstance(message, cell_messages.InterruptCell):  # now: the event loop waits for the cell
            self._interrupts.interrupt(message.number)
        else:
            self._loop.call_soon_threadsafe(self._requests.put_nowait, message)

    async def serve(self) -> None:
        """Run programs and cells until this task is cancelled. Between them, become an engine once that is ordered."""
        while True:
            match await self._requests.get():
                case worker_messages.Program(job=job) if (
                    job == self._newest_job
                ):  # a new driver does not know that it runs already
                    self._session.repeat_result()
                case worker_messages.Program() as order:
                    self._newest_job = order.job
                    self._session.program_begins(order.job)
                    try:
                        result, value = self._result(order, self._program(order))
                    except asyncio.CancelledError:  # this task is to end
                        raise
                    except BaseException as error:  # noqa: BLE001  (the driver must learn of the end)
                        result, value = (
                            worker_messages.ProgramResult(self._session.worker, order.job, summary(error)),
                            b"",
                        )
                    self._session.program_ended(result, value)
                case worker_messages.ConnectEngine(connection=connection):
                    self._connect_engine(connection)
                case cell_messages.Cell(pull=cell_messages.Pull() as pull, number=number):
                    self._session.link.send(state_pull.pull_kept(self._session, number, pull))
                case cell_messages.Cell() as cell:
                    await self._run_cell(cell)

    def _connect_engine(self, connection: str) -> None:
        """Become an engine of this controller in the background. Once it is one, it connects to later controllers by itself."""
        engine = self._session.facts.engine
        if engine:
            self._engine_connected(engine)
        elif self._engine is None or self._engine.done():
            self._engine = self._loop.create_task(self._become_engine(connection))

    async def _become_engine(self, connection: str) -> None:
        try:
            own = await asyncio.to_thread(engine_connection, connection, self._tunnel)  # the tunnel may not answer
            await connect_engine(own, self._profile, self._engine_connected, self._streams)
        except Exception as error:  # noqa: BLE001  (training does not need the engine: this worker goes on)
            print("nbelastic: this worker cannot connect to ipyparallel's controller:", file=sys.stderr)
            traceback.print_exc(file=sys.stderr)
            self._session.link.send(worker_messages.EngineConnected(self._session.worker, "", summary(error)))

    def _engine_connected(self, engine: str) -> None:
        self._session.facts.engine = engine
        self._session.link.send(worker_messages.EngineConnected(self._session.worker, engine))

    async def _run_cell(self, cell: cell_messages.Cell) -> None:
        session = self._session
        try:
            self._code.use(cell.code, get_ipython().user_ns)
        except BaseException as error:  # noqa: BLE001  (the user's modules run here)
            why, lines = summary(error), describe(error)
        else:
            why = lines = "" if cell.pushed is None else self._take_pushed(cell.number, cell.pushed)
        if why:
            session.cell_ended(cell_messages.CellResult(session.worker, cell.number, "", "", why, lines))
        else:
            async with self._streams:
                result = await cells.run(session.worker, cell, session.cell_pieces.put, self._interrupts)
            session.cell_ended(result)

    def _take_pushed(self, number: int, pushed: messages.Pushed) -> str:
        """Set the values in the namespace of cells and programs. Returns an error in one line, or nothing."""
        names = ", ".join(pushed.names)
        try:
            data = self._fetch(cell_messages.push_key(number), pushed.values)
            get_ipython().user_ns.update(pickling.unpack(data))
        except BaseException as error:  # noqa: BLE001  (the values' own code runs here)
            return f"{summary(error)} (while {names} arrived)"
        return ""

    def _program(self, order: worker_messages.Program) -> Outcome:
        log_to(order.log_dir, str(self._session.worker))
        call = None if order.call is None else self._fetch(order.job, order.call, order.number)
        self._names_before = frozenset(get_ipython().user_ns)
        with self._breakpoints.enabled():
            return _run(self._session, order, call, self._code)

    def run_inside(self, order: worker_messages.Program) -> Any:
        """Run a new program inside the present one, and return its value. Raises what it raises."""
        call = None if order.call is None else self._fetch(order.job, order.call, order.number)
        frameworks().begin(order.workers)
        shell = get_ipython()
        with contextlib.suppress(SyntaxError):  # the program raises it
            code = compile(shell.transform_cell(order.source), "", "exec", dont_inherit=True)
            self._session.programs.borrowed = borrowed_names(code, shell.user_ns.keys() - self._names_before)
        with self._code.unless_it_fails():
            self._code.use(order.code, shell.user_ns)
            return _start(order, call)

    def _fetch(self, job: str, call: messages.Blob, number: int = 0) -> pickling.Bytes:
        """The pickled call: from the message, a file, or the driver. OSError if it does not come; JobStoppedError."""
        if call.data:
            return bytearray(call.data)
        if call.path:
            return pickling.mapped(Path(call.path))
        while not self._pieces.empty():  # pieces of an earlier call
            self._pieces.get()
        data, at, now = bytearray(call.size), 0, time.monotonic
        requested = received = -REPEAT
        while at < call.size:
            self._session.refuse_if_stopped(job)
            self._session.programs.raise_if_rejected()
            if self._session.link.disconnected or received < 0:
                received = now()
            if now() - received >= FETCH_TIMEOUT:
                raise OSError(f"the program did not arrive: {at} of {call.size} bytes, none for {FETCH_TIMEOUT:g} s")
            if now() - max(requested, received) >= REPEAT or requested < 0:
                requested = now()
                self._session.link.send(worker_messages.FetchCall(self._session.worker, job, at, number))
            try:
                piece = self._pieces.get(POLL)
            except queue.Empty:
                continue
            if (piece.job, piece.number) == (job, number) and piece.offset == at:
                data[at : at + len(piece.data)] = piece.data
                at, received = at + len(piece.data), now()
                if at % (pickling.PIECES * pickling.PIECE) == 0:  # all requested pieces have arrived
                    requested = -REPEAT
        return data

    def _result(self, order: worker_messages.Program, outcome: Outcome) -> tuple[worker_messages.ProgramResult, bytes]:
        """The result for the driver, and a value that the driver fetches. A long value goes into a file if possible."""
        blob, kept, error = None, b"", outcome.error
        if outcome.value is not None:
            size = pickling.size(outcome.value)
            path = Path(order.results) / f"{str(self._session.worker).replace('/', '-')}.{order.job}"
            if size <= pickling.INLINE:
                blob = messages.Blob(size, b"".join(outcome.value))
            elif order.results and not (why := _write_value(path, outcome.value)):
                blob = messages.Blob(size, path=str(path))
            elif order.results and size > pickling.IN_MEMORY:
                error = pickling.no_space("the result", size, path.parent, why)
            else:
                blob, kept = messages.Blob(size), b"".join(outcome.value)
        worker = self._session.worker
        return worker_messages.ProgramResult(worker, order.job, error, outcome.traceback, blob), kept


def _write_value(path: Path, value: list[memoryview]) -> str:
    """Why the value cannot be written, if so: the driver then fetches a small one, as from another machine."""
    try:
        replace_private(path, value)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _run(session: Session, order: worker_messages.Program, call: pickling.Bytes | None, user_code: UserCode) -> Outcome:
    with _redirected_output(session), printed_displays(get_ipython()), contextlib.ExitStack() as at_end:
        try:
            session.begin(order.job, order.number)
            user_code.use(order.code, get_ipython().user_ns)
            frameworks().begin(order.workers)
            _prepare_checkpoints(session, order, at_end)
            value = _until_replaced(session, partial(_start, order, call))
        except BaseException as error:  # noqa: BLE001  (it ends the program, not the worker)
            explain_undefined_name(error, get_ipython().user_ns)
            text = "" if isinstance(error, JobStoppedError) else describe(error)
            print(text or f"stopped: {error}", file=sys.stderr)
            return Outcome(error=summary(error), traceback=text)
        finally:
            frameworks().end()
            if session.checkpoints is not None:
                session.checkpoints.finish()
            session.finish()
        try:
            return Outcome(pickling.pack(value))
        except Exception as error:  # noqa: BLE001  (pickling fails in many ways)
            text = f"{type(error).__name__}: the result cannot be sent: {printable(str(error)[:MAX_ERROR])}"
            print(text, file=sys.stderr)
            return Outcome(error=text)


def _start(order: worker_messages.Program, call: pickling.Bytes | None) -> Any:
    with end_forked_children():
        return _execute(order, order.source) if call is None else _call(call)


def _until_replaced(session: Session, program: Callable[[], Any]) -> Any:
    """Run the program; the value, or the error, is that of the last one that has replaced it."""
    try:
        value = program()
    except BaseException:
        if session.programs.end is None:
            raise
    end, session.programs.end = session.programs.end, None
    if end is None:
        return value
    if end.error is not None:
        raise end.error
    return end.value


def _prepare_checkpoints(session: Session, order: worker_messages.Program, at_end: contextlib.ExitStack) -> None:
    """Set up the job's checkpoints, if it has any. StateError if they cannot be written. `at_end` unlocks their folder."""
    if order.checkpoints is None:
        return
    plan = Plan(*order.checkpoints, is_rank_0=lambda: session.is_rank_0)
    plan.prepare()
    at_end.enter_context(folder_lock(plan.folder, order.cluster, Path(order.log_dir).parent))
    session.checkpoints = plan


@contextlib.contextmanager
def _redirected_output(session: Session) -> Iterator[None]:
    out, err = (OutputStream(partial(session.output.write, name), fd) for name, fd in (("out", 1), ("err", 2)))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield
    out.flush()
    err.flush()


def _call(call: pickling.Bytes) -> Any:
    function, args, kwargs, needed = pickling.unpack(call)
    refuse_undefined_names(needed, _add_names(function, get_ipython().user_ns))
    return function(*args, **kwargs)


def _add_names(function: Any, namespace: Mapping[str, Any]) -> Collection[str]:
    """Let a notebook's function use names that cells have defined on this worker, unless the notebook defines them.

    Returns all names that it can use.
    """
    while isinstance(function, partial):
        function = function.func
    plain = function if hasattr(inspect.unwrap(function), "__globals__") else type(function).__call__
    own = getattr(inspect.unwrap(plain), "__globals__", {})
    if own.get("__name__") == "__main__":
        for name, value in namespace.items():
            own.setdefault(name, value)
    return frozenset(own)


def _execute(order: worker_messages.Program, source: str) -> Any:
    """Run the cell in this worker's namespace; return the value of its last expression."""
    shell = get_ipython()
    filename = f"<{order.job}, new program>" if order.number else f"<{order.job}>"
    code = shell.transform_cell(source)
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    tree = ast.parse(code, filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    compiled = partial(
        compile, filename=filename, dont_inherit=True
    )  # not with the `__future__` imports of this module
    exec(compiled(tree, mode="exec"), shell.user_ns)  # noqa: S102  (running the user's cell is the purpose)
    return None if last is None else eval(compiled(ast.Expression(last.value), mode="eval"), shell.user_ns)  # noqa: S307
