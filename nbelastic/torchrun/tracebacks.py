"""The parts of a worker's error that its user needs."""

from __future__ import annotations

import os
import runpy
from types import TracebackType

MOST = 20_000  # characters of a traceback in a message
MOST_OF_A_LINE = 500  # characters of an error's first line
_RUNNERS = (os.path.dirname(os.path.abspath(__file__)), "<frozen runpy>", runpy.__file__)
_TORCH_RUNNER = os.path.join("torch", "distributed", "elastic", "multiprocessing")


def user_traceback(text: str) -> str:
    """A traceback without the frames that ran the script; the beginning and the end of one longer than `MOST`."""
    lines, kept, skipping = text.splitlines(keepends=True), [], False
    for line in lines:
        if line.startswith('  File "'):
            skipping = line.startswith(tuple(f'  File "{name}' for name in _RUNNERS)) or _TORCH_RUNNER in line
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    text = "".join(kept)
    return text if len(text) <= MOST else f"{text[: MOST // 2]}\n…\n{text[-MOST // 2 :]}"


def user_frames(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback from the script's first frame on."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_RUNNERS):
        traceback = traceback.tb_next
    return traceback


def first_line(text: str) -> str:
    """The first line of an error's text, cut after `MOST_OF_A_LINE` characters."""
    line = (text.strip().splitlines() or ["an error without a message"])[0]
    return line if len(line) < MOST_OF_A_LINE else f"{line[:MOST_OF_A_LINE]}…"
