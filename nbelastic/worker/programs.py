"""Which of the job's programs runs in this worker, and the new one that is to replace it: see `core.swaps`."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from nbelastic.protocol import worker_messages
from nbelastic.worker import protocol
from nbelastic.worker.inbox import Inbox
from nbelastic.worker.interrupts import ProgramRejected
from nbelastic.worker.user_stack import is_in_user_code

RETRY = 0.05  # seconds until the user's code is interrupted if our own code runs


class Programs:
    """For the main thread, as `Session`. `send(message)` sends it to the driver."""

    def __init__(self, machine: protocol.Protocol, inbox: Inbox, send: Callable[[Any], object]) -> None:
        self._protocol, self._inbox, self._send = machine, inbox, send
        self.run: Callable[[worker_messages.Program], Any]  # runs a new program inside the present one
        self.ordered: worker_messages.NewProgram | None = None  # to be run between two generations
        self._rejected = 0  # the program that the driver has rejected last
        self.outer: Any = None  # the elastic loop's part that runs the present program inside another one

    @property
    def on_trial(self) -> bool:
        """Whether the present program is a new one that the driver has not accepted yet."""
        return self._protocol.on_trial

    def begin(self, number: int, *, on_trial: bool) -> int:
        """Another program is the present one; returns the number of the one from before."""
        before, self.ordered = self._protocol.program, None
        with self._inbox.lock:
            self._protocol.program, self._protocol.on_trial = number, on_trial
        return before

    def keeps(self, number: int) -> bool:
        """The job's program has this number: whether that is the present one, on trial until now. ProgramRejected if not."""
        was_on_trial, self._protocol.on_trial = self.on_trial, False
        if was_on_trial and number != self._protocol.program:
            raise ProgramRejected
        return was_on_trial

    def interrupt(self, number: int) -> None:
        """In the link's thread: the job's program has this number. Interrupt the user's code of a new one with another."""
        if self.on_trial and number != self._protocol.program:
            self._rejected = self._protocol.program
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    @property
    def _is_rejected(self) -> bool:
        return self.on_trial and self._rejected == self._protocol.program

    def raise_if_rejected(self) -> None:
        """ProgramRejected if the driver has rejected the present program, which is on trial."""
        if self._is_rejected:
            raise ProgramRejected

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise ProgramRejected in the user's code if the driver rejects the present program. Our own code asks for itself."""

        def end(_: int, frame: FrameType | None) -> None:
            if is_in_user_code(frame):
                self.raise_if_rejected()
            elif self._is_rejected:
                signal.setitimer(signal.ITIMER_REAL, RETRY)

        before = signal.signal(signal.SIGALRM, end)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            # A late signal would end the process by default.
            signal.signal(signal.SIGALRM, signal.SIG_IGN if before is signal.SIG_DFL else before)

    def report(self, *, notes: tuple[str, ...] = (), error: str = "", traceback: str = "", number: int = 0) -> None:
        """Tell the user what the new program has not taken over, or why it has ended before its first commit."""
        machine = self._protocol
        number = number or machine.program
        self._send(worker_messages.SwapReport(machine.worker, number, notes, error, traceback))
