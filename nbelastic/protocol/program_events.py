"""Events of a program, in the past tense: it is replaced while it trains (see `core.swaps`), waits at a breakpoint, or its
ranks hold different values.
"""

# mypy: disable-error-code="misc"
# (subclasses of a frozen msgspec struct are frozen, too, which mypy does not know)
from __future__ import annotations

from nbelastic.protocol.events import Event
from nbelastic.protocol.ids import WorkerId


class SwapSubmitted(Event):
    """Client → core: at the next commit, replace the program of the present job by this one."""

    program: int
    by: str = ""


class SwapCancelled(Event):
    """Driver → core: no client waits for this program any more."""

    program: int


class SwapFailed(Event):
    """Worker → core: the new program has ended before its first commit, so this worker returns to the old one."""

    worker: WorkerId
    program: int
    error: str


class BreakpointReached(Event):
    """Worker → driver: the program waits in the debugger, at `place`, for input number `number`.

    `text`: what the debugger has printed since the last input. The worker repeats the event while it waits.
    """

    worker: WorkerId
    number: int
    place: str
    text: str


class BreakpointLeft(Event):
    """Worker → driver: the program goes on."""

    worker: WorkerId


class ReplicaDiffered(Event):
    """Driver → core: at this commit the worker has other values than most ranks. Once in each generation.

    `were_equal`: earlier in this generation all ranks had the same values, after all of them had been compared.
    """

    worker: WorkerId
    generation: int
    commit: int
    were_equal: bool
