"""What a terminal leaves of text in which a carriage return begins a line anew, as progress bars print it."""

from __future__ import annotations

import re

_CONTROLS = re.compile(
    r"\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # a command to the terminal itself, as for its title
    r"|\x1b\[[0-?]*[ -/]*[@-ln-~]"  # a control sequence that is no colour
    r"|\x1b(?!\[[0-9;:]*m)[ -/]*[0-Z\\^-~]?"  # any other escape
    r"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]"
)
_MOVES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-ln-~]")  # control sequences, but for those of colours, which end in `m`


def newest(text: str) -> str:
    """The text without the frames that a later one of the same line replaces.

    A frame keeps the carriage return before it, by which it replaces what was sent of the line earlier.
    """
    return "\n".join(map(_newest_frame, text.split("\n"))) if "\r" in text else text


def plain(text: str) -> str:
    """What may be written to a terminal, of text that a program or another host has made: colours and tabs, and no other control.

    Others could change the terminal's title, its clipboard or what stands above.
    """
    return _CONTROLS.sub("", text)


def shown(line: str) -> str:
    """One line as a terminal leaves it: its last frame, with colours, without what moves the cursor."""
    if "\r" not in line and "\x1b" not in line:
        return line
    return _MOVES.sub("", _newest_frame(line)).strip("\r").rstrip(" ")


def _newest_frame(line: str) -> str:
    begin = line.rstrip("\r").rfind("\r")
    return line[begin:] if begin >= 0 else line
