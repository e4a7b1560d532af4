"""Which of the job's programs runs in this worker, and the new one that is to replace it: see `core.swaps`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from nbelastic.protocol import worker_messages
from nbelastic.worker import alarms, protocol
from nbelastic.worker.inbox import Inbox
from nbelastic.worker.interrupts import ProgramRejected, ProgramReplaced
from nbelastic.worker.user_stack import is_in_user_code

BORROWED = "workers that join later cannot run the new program, as only earlier ones define"
RETRY = 0.05  # seconds until the user's code is interrupted if our own code runs


class Programs:
    """For the main thread, as `Session`. `send(message)` sends it to the driver."""

    def __init__(self, machine: protocol.Protocol, inbox: Inbox, send: Callable[[Any], object]) -> None:
        self._protocol, self._inbox, self._send = machine, inbox, send
        self.run: Callable[[worker_messages.Program], Any]  # runs a new program inside the present one
        self.ordered: worker_messages.NewProgram | None = None  # to be run between two generations
        self._newest = 0  # the newest program that the driver has sent
        self._kept: int | None = None  # the job's program, as the driver has decided since
        self.outer: Any = None  # the elastic loop's part that runs the present program inside another one
        self.borrowed: tuple[str, ...] = ()  # names of earlier programs that the newest one uses
        self.end: ProgramReplaced | None = (
            None  # the last program has ended: the job's has, whatever the others still do
        )

    @property
    def on_trial(self) -> bool:
        """Whether the present program is a new one that the driver has not accepted yet."""
        return self._protocol.on_trial

    @property
    def program(self) -> int:
        """The number of the present program."""
        return self._protocol.program

    def begin(self, number: int, *, on_trial: bool) -> None:
        """Another program is the present one."""
        self.ordered = None
        with self._inbox.lock:
            self._protocol.program, self._protocol.on_trial = number, on_trial

    def replace(self, value: object = None, error: BaseException | None = None) -> NoReturn:
        """The present program has ended, which has replaced others: raise ProgramReplaced in them."""
        self.end = self.end or ProgramReplaced(value, error)
        raise self.end from None

    def keeps(self, number: int) -> bool:
        """The job's program has this number: whether that is the present one, on trial until now. ProgramRejected if not."""
        was_on_trial, self._protocol.on_trial = self.on_trial, False
        if was_on_trial and number != self._protocol.program:
            raise ProgramRejected
        return was_on_trial

    def note(self, order: worker_messages.NewProgram | worker_messages.KeepProgram) -> None:
        """In the link's thread: the driver has decided. Interrupt the user's code of a program that it has rejected."""
        if isinstance(order, worker_messages.NewProgram):
            self._newest, self._kept = order.program.number, None
        else:
            self._kept = order.number
        if self._is_rejected:
            alarms.interrupt_main_thread()

    @property
    def _is_rejected(self) -> bool:
        """Whether the driver has rejected the present program; its message may not have been read yet."""
        present = self._protocol.program
        return self.on_trial and (self._newest > present or self._kept not in (None, present))

    def raise_if_rejected(self) -> None:
        """ProgramRejected if the driver has rejected the present program, which is on trial."""
        if self._is_rejected:
            raise ProgramRejected

    @contextlib.contextmanager
    def interruptible(self, number: int, *, on_trial: bool, old_goes_on: Callable[[], bool]) -> Iterator[None]:
        """Begin this program. Raise ProgramRejected in the user's code if the driver rejects it. Our own code asks for itself.

        `old_goes_on()`: whether the program inside which it runs does so afterwards.
        """

        def end(frame: FrameType | None) -> None:
            if is_in_user_code(frame):
                self.raise_if_rejected()
            elif self._is_rejected:
                alarms.interrupt_after(RETRY)

        with alarms.handling(end, old_goes_on):
            self.begin(number, on_trial=on_trial)  # now, as the handler is there
            self.raise_if_rejected()
            yield

    def report_notes(self, notes: list[str]) -> None:
        """On rank 0: tell the client what it should print about the new program."""
        if self.borrowed:
            names = ", ".join(self.borrowed)
            notes = [*notes, f"{BORROWED} {names}. Swap in a cell that defines all it uses"]
        if self._protocol.is_rank_0:
            self.report(notes=tuple(notes))

    def report(self, *, notes: tuple[str, ...] = (), error: str = "", traceback: str = "", number: int = 0) -> None:
        """Tell the user what the new program has not taken over, or why it has ended before its first commit."""
        machine = self._protocol
        number = number or machine.program
        self._send(worker_messages.SwapReport(machine.worker, number, notes, error, traceback))
