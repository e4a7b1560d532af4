"""Texts that hosts send to the driver: a text that people see beside others is one line of printable characters, and not long.

What a program prints stays as it is: it is shown on its own. Tracebacks and stacks have several lines, without control
sequences other than for colours.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, get_args

from msgspec import Struct, structs

from nbelastic.protocol import cell_messages, messages, program_events, script_events, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.system.terminal_text import printable_line, remove_controls

# By kind of message, what stays as it is: the output of programs, and what is never shown.
KEPT: dict[type[Struct], frozenset[str]] = {
    WorkerId: frozenset({"host"}),  # the name of its sender has it, too
    messages.Blob: frozenset({"path"}),
    messages.WorkerOutput: frozenset({"text"}),
    cell_messages.CellPiece: frozenset({"text"}),
    cell_messages.CellResult: frozenset({"stdout", "stderr"}),
}
# By kind of message, what may have several lines.
LINES: dict[type[Struct], str] = {
    cell_messages.CellResult: "traceback",
    program_events.BreakpointReached: "text",
    script_events.Failure: "traceback",
    worker_messages.ProgramResult: "traceback",
    worker_messages.StackShown: "text",
    worker_messages.SwapReport: "traceback",
}
T = TypeVar("T", bound=Struct)


def cleaned(message: T) -> T:
    """The message, with its texts as above."""
    changed = {}
    several = LINES.get(type(message))
    for name in _fields_with_text(type(message)):
        before = getattr(message, name)
        if (after := remove_controls(before) if name == several else _clean(before)) != before:
            changed[name] = after
    return structs.replace(message, **changed) if changed else message


def _clean(value: Any) -> Any:
    match value:
        case str():
            return printable_line(value)
        case Struct():
            return cleaned(value)
        case tuple():
            return tuple(map(_clean, value))
        case dict():
            return {_clean(key): _clean(each) for key, each in value.items()}
    return value


@cache
def _fields_with_text(kind: type[Struct]) -> tuple[str, ...]:
    kept = KEPT.get(kind, ())
    return tuple(field.name for field in structs.fields(kind) if field.name not in kept and _may_have_text(field.type))


def _may_have_text(kind: Any) -> bool:
    if isinstance(kind, type) and issubclass(kind, Struct):
        return bool(_fields_with_text(kind))
    return kind is str or any(map(_may_have_text, get_args(kind)))
