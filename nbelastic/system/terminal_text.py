"""Text with carriage returns and escape sequences, as progress bars print it."""

from __future__ import annotations

import re

_CONTROLS = re.compile(
    r"\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # a command to the terminal itself, such as to set its title
    r"|\x1b\[[0-?]*[ -/]*[@-ln-~]"  # a control sequence other than for colours
    r"|\x1b(?!\[[0-9;:]*m)[ -/]*[0-Z\\^-~]?"  # any other escape
    r"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]"
)
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
MOST_OF_A_LINE = 1000  # characters of another host's text that people see


LINE_STEP = re.compile(r"(\n|\x1b\[[0-9]{0,9}A)")  # to another line: down, or up, as nested progress bars do


def drop_replaced_frames(text: str) -> str:
    """Keep only the last frame of each line: a carriage return begins a frame, which replaces the one before.

    The last frame keeps its carriage return, so that it also replaces earlier text of the line that was sent already.
    """
    return "\n".join(map(_newest_frame, text.split("\n"))) if "\r" in text else text


def remove_controls(text: str) -> str:
    """Remove control characters and sequences other than colours and tabs.

    Text of a program or another host could otherwise change the terminal's title, clipboard or earlier lines.
    """
    return _CONTROLS.sub("", text)


def printable_line(text: str, most: int = MOST_OF_A_LINE) -> str:
    """The text as one line of at most `most` printable characters, without colours."""
    if len(text) <= most and text.isprintable():
        return text
    text = remove_controls(_COLOURS.sub("", text[: 4 * most].strip()))
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= most else f"{line[: most - 1]}…"


def as_displayed(line: str) -> str:
    """One line as a terminal displays it: its last frame, with colours and tabs, without other control characters and sequences."""
    if line.isprintable() or not _CONTROLS.search(line):
        return line
    return remove_controls(_newest_frame(line)).rstrip(" ")


def _newest_frame(line: str) -> str:
    begin = line.rstrip("\r").rfind("\r")
    return line[begin:] if begin >= 0 else line
