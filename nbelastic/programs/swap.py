"""A new program takes over the training: it runs inside the old one's elastic loop, between two generations.

Until the driver has accepted it, which it does at the first commit, the old program can go on: it keeps its state, with
copies of all tensors. After that only the new one goes on. When it ends, the old one's functions end with it.
"""

from __future__ import annotations

from typing import Any, Protocol

from nbelastic.errors import JobStoppedError, StateError, UsageError
from nbelastic.programs.tracebacks import describe, summary
from nbelastic.protocol import worker_messages
from nbelastic.state.state import State
from nbelastic.state.takeover import check, initial_values, take_over
from nbelastic.worker.interrupts import ProgramRejected, ProgramReplaced
from nbelastic.worker.session import JobCheckpoints, Session

NO_COMMIT = "the new program has ended before its first commit"


class Loop(Protocol):
    """The elastic loop of a program."""

    @property
    def state(self) -> State: ...

    swap: Swap

    def forget(self) -> None: ...


class Swap:
    """The part of an elastic loop that replaces its program, or that has replaced another one's."""

    def __init__(self, session: Session, loop: Any) -> None:
        self._session, self._loop = session, loop
        self._old: Swap | None = session.programs.outer  # of the program inside which this one runs
        self._initial: dict[str, Any] = {}  # small values of the state at the beginning of the program
        self._checkpoints: JobCheckpoints | None = None  # of the job, while a new program runs
        self.is_over = False  # a new program has replaced this one
        self.is_unequal = False  # the state has fresh values, which may differ between the ranks

    @property
    def _shares_state(self) -> bool:
        old = self._old
        return old is not None and not old.is_over and old._loop.state is self._loop.state

    def begin_state(self) -> None:
        """The elastic loop begins: with its own state or, as a new program, with the values of the old one's."""
        session, state, old = self._session, self._loop.state, self._old
        if old is None or old.is_over:
            state.begin(session)
            self._initial = initial_values(state)
        elif self._shares_state:
            self._initial = old._initial
            state._steps.start(session)
        else:
            state.begin(session)
            self._initial = initial_values(state)
            taken = take_over(state, old._loop.state, old._initial, self._initial)
            self.is_unequal = taken.has_fresh_tensors
            if session.is_rank_0:
                session.programs.report(notes=tuple(taken.notes))

    def end_state(self) -> None:
        """The elastic loop has ended."""
        if self._shares_state and self._session.programs.on_trial:
            self._loop.state._steps.stop()
        elif not self.is_over:
            self._session.ended_state = self._loop.state if self._session.facts.holds_state else None
            self._loop.state._contents.close_logs()
            self._loop.state.end()

    def check_kept(self) -> None:
        """UsageError if the function returns while the program is on trial: it has made no commit."""
        if self._session.programs.on_trial:
            raise UsageError(f"{NO_COMMIT}.")

    def keep(self) -> None:
        """The driver has accepted this program: the old one cannot go on any more."""
        old, shares = self._old, self._shares_state
        self._old = None
        if old is not None and not old.is_over:
            self._session.checkpoints = old._checkpoints
            old.end(with_state=not shares)

    def end(self, *, with_state: bool = True) -> None:
        """Another program has replaced this one, which does not go on."""
        if with_state:
            self._loop.state._contents.close_logs()
            self._loop.state.end()
        self.is_over = True
        self._loop.forget()

    def run(self, order: worker_messages.NewProgram) -> None:
        """Run a new program inside this one. Returns if it has failed; else raises ProgramReplaced at its end."""
        session, programs, number = self._session, self._session.programs, order.program.number
        try:
            check(self._loop.state)
        except StateError as error:
            programs.ordered = None
            programs.report(error=summary(error), number=number)
            return
        self._checkpoints = session.checkpoints
        if order.on_trial:
            self._loop.state._set_aside()
            session.checkpoints = None  # those of the job are of states that it can return to
        else:
            self.end()  # all other workers have accepted it
        session.leave_group()
        session.used, session.warm_ups = False, []
        before = programs.begin(number, on_trial=order.on_trial)
        programs.outer, outer = self, programs.outer
        failure, lines = "", ""
        try:
            with programs.interruptible():
                value = programs.run(order.program)
        except (JobStoppedError, ProgramReplaced):
            raise
        except ProgramRejected:
            pass
        except BaseException as error:  # noqa: BLE001  (it ends the new program only)
            if self.is_over:
                raise ProgramReplaced(error=error) from None
            failure, lines = summary(error), describe(error)
        else:
            if self.is_over:
                raise ProgramReplaced(value)
            failure = NO_COMMIT
        finally:
            programs.outer = outer
            if not self.is_over:
                session.checkpoints = self._checkpoints
        session.leave_group()
        programs.begin(before, on_trial=False)
        session.holder, session.warm_ups = self._loop, []
        self._loop.state._take_up(session)
        if failure:
            programs.report(error=failure, traceback=lines, number=number)
