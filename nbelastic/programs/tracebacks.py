"""Describes an error of the user's code, as one line and as a traceback."""

from __future__ import annotations

import traceback
from pathlib import Path

from nbelastic.worker.error_text import text_of
from nbelastic.worker.output_buffer import printable

MAX_ERROR = 500  # characters of an error's text
MAX_TRACEBACK = 100_000  # last characters of a traceback that are sent


def summary(error: BaseException) -> str:
    """The error in one line."""
    module, name = type(error).__module__, type(error).__qualname__
    name = name if module in ("builtins", "__main__") else f"{module}.{name}"
    if isinstance(error, SystemExit):
        message = f"the program called sys.exit({error.code!r})"
    else:
        message = str(error.msg or "") if isinstance(error, SyntaxError) else text_of(error)
    text = f"{name}: {message}" if message else name
    if len(text) > MAX_ERROR:  # the cause may stand at the end, as in an error of a DataLoader's worker
        text = f"{text[: MAX_ERROR // 2]} … {text[-MAX_ERROR // 2 :]}"
    return printable(text)


def describe(error: BaseException) -> str:
    """The traceback from the user's first line on, without nbelastic's own frames."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    user_frames = [frame for frame in frames if not frame.filename.startswith(ours)] or list(frames)
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(user_frames)]
    return printable("".join(lines + traceback.format_exception_only(error))[-MAX_TRACEBACK:])
