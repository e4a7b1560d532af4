"""A new program takes over the training: it runs inside the old one's elastic loop, between two generations.

Until the driver has accepted it, which it does at the first commit, the old program can go on: it keeps its state, with
copies of all tensors. After that only the new one goes on. When it ends, the old one's functions end with it.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, Protocol

from IPython.core.getipython import get_ipython

from nbelastic.errors import JobStoppedError, UsageError
from nbelastic.programs.tracebacks import describe, summary
from nbelastic.protocol import worker_messages
from nbelastic.state.state import State
from nbelastic.state.takeover import Initial, initial_values, take_over
from nbelastic.worker.interrupts import ProgramRejected, ProgramReplaced
from nbelastic.worker.job_checkpoints import JobCheckpoints
from nbelastic.worker.session import Session

FRAMES = 100  # of calls between two programs that run inside each other
WORTH_COLLECTING = 1 << 26  # bytes; to look for unused objects takes 0.2 s
NO_COMMIT = "the new program has ended before its first commit"


class Loop(Protocol):
    """The elastic loop of a program."""

    @property
    def state(self) -> State: ...

    swap: Swap

    def forget(self) -> None: ...


def cell_names() -> dict[str, Any]:
    """The variables of cells on this worker. An old program that goes on uses its own, not those of one that has failed."""
    shell = get_ipython()
    return {} if shell is None else shell.user_ns


def _free_memory(state: State) -> None:
    """Free models that are not used any more: DDP and others refer to themselves. For a small one it is not worth the time."""
    if sum(tensor.nbytes for tensor in state._large()) > WORTH_COLLECTING:
        gc.collect()


class Swap:
    """The part of an elastic loop that replaces its program, or that has replaced another one's."""

    def __init__(self, session: Session, loop: Any) -> None:
        self._session, self._loop = session, loop
        self._old: Swap | None = session.programs.outer  # of the program inside which this one runs
        self._initial = Initial({}, {})  # values of the state at the beginning of the program
        self._checkpoints: JobCheckpoints | None = None  # of the job, while a new program runs
        self._names: dict[str, Any] = {}  # of cells, as the old program knows them, while a new one is tried
        self.is_over = False  # a new program has replaced this one
        self.is_unequal = False  # the state has fresh values, which may differ between the ranks

    @property
    def _tried_inside(self) -> Swap | None:
        """The part of the old program's loop, while this program is not accepted yet."""
        return None if self._old is None or self._old.is_over else self._old

    def begin_state(self) -> None:
        """The elastic loop begins: with its own state or, as a new program, with the values of the old one's."""
        session, state, old = self._session, self._loop.state, self._tried_inside
        if old is None:
            state.begin(session)
            self._initial = initial_values(state)
        elif old._loop.state is state:
            self._initial = old._initial
            state._begin_again(session)
            session.programs.report_notes([])
        else:
            state.begin(session)
            self._initial = initial_values(state)
            taken = take_over(state, old._loop.state, old._initial, self._initial)
            self.is_unequal = taken.may_be_unequal
            session.programs.report_notes(taken.notes)

    def end_state(self) -> None:
        """The elastic loop has ended. A program that has failed before it was accepted leaves nothing behind."""
        old = self._tried_inside
        if self.is_over or (old is not None and old._loop.state is self._loop.state):  # the old one takes it up
            return
        if old is None:
            self._session.ended_state = self._loop.state if self._session.facts.holds_state else None
        self._loop.state._contents.close_logs()
        self._loop.state.end()

    def check_kept(self) -> None:
        """UsageError if the function returns while the program is on trial: it has made no commit."""
        if self._session.programs.on_trial:
            raise UsageError(f"{NO_COMMIT}.")

    def keep(self) -> None:
        """The driver has accepted this program: the old one cannot go on any more."""
        old, self._old = self._tried_inside, None
        if old is not None:
            self._session.checkpoints = old._checkpoints
            old.end(keep=self._loop.state)
            self._loop.state._program_kept(self._session)
            _free_memory(self._loop.state)

    def end(self, *, keep: State | None = None) -> None:
        """Another program has replaced this one, which does not go on. `keep`: the state of that one, maybe the same."""
        state = self._loop.state
        if keep is not state:
            state._contents.close_logs()
            state.end()
        self.is_over, self._names = True, {}
        self._loop.forget()

    def run(self, order: worker_messages.NewProgram) -> None:
        """Run a new program inside this one. Returns if it has failed; else raises ProgramReplaced at its end."""
        session, programs, number = self._session, self._session.programs, order.program.number
        try:
            if order.on_trial:
                self._loop.state._set_aside()
        except Exception as error:  # noqa: BLE001  (out of memory, for example)
            programs.ordered = None
            programs.report(error=summary(error), number=number)
            return
        self._checkpoints, held = session.checkpoints, session.facts.holds_state
        if order.on_trial:
            session.checkpoints = None  # those of the job are of states that it can return to
            self._names = dict(cell_names())
        else:
            self.end()  # all other workers have accepted it
        session.leave_group()
        session.used, session.warm_ups = False, []
        before = programs.program
        programs.outer, outer = self, programs.outer
        failure, lines, depth = "", "", sys.getrecursionlimit()
        sys.setrecursionlimit(depth + FRAMES)
        try:
            with programs.interruptible(number, on_trial=order.on_trial, old_goes_on=lambda: not self.is_over):
                value = programs.run(order.program)
        except ProgramReplaced:
            raise
        except (JobStoppedError, ProgramRejected):  # of a stopped job, the old program is the one to end
            if self.is_over:
                raise
        except BaseException as error:  # noqa: BLE001  (it ends the new program only)
            if self.is_over:
                programs.replace(error=error)
            failure, lines = summary(error), describe(error)
        else:
            if self.is_over:
                programs.replace(value)
            failure = NO_COMMIT
        finally:
            programs.outer = outer
            sys.setrecursionlimit(depth)
        session.facts.holds_state = held
        self._go_on(before)
        if failure:
            programs.report(error=failure, traceback=lines, number=number)

    def _go_on(self, number: int) -> None:
        """The new program has failed: go on with the state, the checkpoints and the variables from before."""
        session = self._session
        session.leave_group(abort=True)
        session.programs.begin(number, on_trial=False)
        session.holder, session.checkpoints, session.warm_ups = self._loop, self._checkpoints, []
        self._loop.state._take_up(session)
        cell_names().clear()
        cell_names().update(self._names)
        self._names = {}
        _free_memory(self._loop.state)
