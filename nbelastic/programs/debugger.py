"""`breakpoint()` in a program: pdb waits for lines that a client sends (`%elastic_debug`), while the other ranks wait."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import pdb  # noqa: T100  (it is what users expect)
import queue
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from nbelastic.protocol import program_events as pev
from nbelastic.protocol import worker_messages
from nbelastic.system.signal_safe_queue import SignalSafeQueue
from nbelastic.worker.output_buffer import MAX_TEXT, printable
from nbelastic.worker.session import Session
from nbelastic.worker.user_stack import current_line, user_frames

POLL = 0.1  # seconds between two checks whether the world is over
REPEAT = 2.0  # seconds between two reports that it waits: a new driver does not know
ELSEWHERE = "nbelastic: breakpoint() is left out: the debugger works in the main thread of a worker.\n"


class Breakpoints:
    """The debugger of a worker: as standard input and output of pdb. `take` is for the link's thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lines: SignalSafeQueue[worker_messages.DebuggerInput] = SignalSafeQueue()
        self._numbers = itertools.count(time.time_ns())  # a line for an earlier program of this worker must not count
        self._printed: list[str] = []

    def take(self, message: worker_messages.DebuggerInput) -> None:
        self._lines.put(message)

    @contextlib.contextmanager
    def enabled(self) -> Iterator[None]:
        """`breakpoint()` and `pdb.set_trace()` stop here."""
        before = sys.breakpointhook, pdb.set_trace
        pid = os.getpid()

        def stop(*_: Any, **__: Any) -> None:
            if os.environ.get("PYTHONBREAKPOINT") == "0":
                return
            if os.getpid() != pid or threading.current_thread() is not threading.main_thread():
                sys.stderr.write(ELSEWHERE)
                return
            _Debugger(self).set_trace(sys._getframe(1))

        sys.breakpointhook = pdb.set_trace = stop
        try:
            yield
        finally:
            sys.breakpointhook, pdb.set_trace = before

    def left(self) -> None:
        self._printed.clear()
        self._session.link.send(pev.BreakpointLeft(self._session.worker))

    # ---- pdb's files ----

    def write(self, text: str) -> int:
        self._printed.append(text)
        return len(text)

    def flush(self) -> None:
        """Nothing is sent before pdb asks for a line."""

    def readline(self) -> str:
        """The next line of a client. WorldAborted, ProgramRejected or JobStoppedError if the program is to leave meanwhile."""
        try:
            return self._wait_for_line()
        except BaseException:
            self.left()
            raise

    def _wait_for_line(self) -> str:
        session, number = self._session, next(self._numbers)
        text = printable("".join(self._printed)[-MAX_TEXT:])
        self._printed.clear()
        waits, sent = pev.BreakpointReached(session.worker, number, current_line(), text), 0.0
        while True:
            if time.monotonic() - sent > REPEAT:
                sent = time.monotonic()
                session.link.send(waits)
            try:
                line = self._lines.get(POLL)
            except queue.Empty:
                session.programs.raise_if_rejected()
                session.raise_if_over()
                session.refuse_if_stopped(session.output.job)
                continue
            if line.number == number:
                return f"{line.line}\n"


class _Debugger(pdb.Pdb):
    def __init__(self, terminal: Breakpoints) -> None:
        super().__init__(stdin=terminal, stdout=terminal, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.use_rawinput = False
        self._terminal = terminal

    def get_stack(self, f: Any, t: Any) -> Any:
        """Only frames of the program, not those that have called it."""
        stack, index = super().get_stack(f, t)
        shown = [entry for entry in stack if entry[0] in user_frames(stack[index][0])] or stack[index : index + 1]
        return shown, len(shown) - 1

    def set_continue(self) -> None:
        super().set_continue()
        self._terminal.left()

    def set_return(self, frame: Any) -> None:
        """From a generator the program goes on: pdb does not stop when a generator yields."""
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            self.set_continue()
        else:
            super().set_return(frame)

    def do_quit(self, arg: str) -> bool | None:
        """The training goes on: a user who only wants to look must not end it."""
        return self.do_continue(arg)

    do_q = do_exit = do_EOF = do_quit  # noqa: N815  (pdb's names)
