"""What a terminal leaves of text in which a carriage return begins a line anew, as progress bars print it."""

from __future__ import annotations

import re

_MOVES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-ln-~]")  # control sequences, but for those of colours, which end in `m`


def newest(text: str) -> str:
    """The text without the frames that a later one of the same line replaces.

    A frame keeps the carriage return before it, by which it replaces what was sent of the line earlier.
    """
    return "\n".join(map(_newest_frame, text.split("\n"))) if "\r" in text else text


def shown(line: str) -> str:
    """One line as a terminal leaves it: its last frame, with colours, without what moves the cursor."""
    if "\r" not in line and "\x1b" not in line:
        return line
    return _MOVES.sub("", _newest_frame(line)).strip("\r").rstrip(" ")


def _newest_frame(line: str) -> str:
    begin = line.rstrip("\r").rfind("\r")
    return line[begin:] if begin >= 0 else line
