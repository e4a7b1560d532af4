"""Where the threads are, asked from another one."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
import traceback
from types import FrameType

STACK_BOUND = 64_000  # characters
_LIBRARIES = (
    *dict.fromkeys(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib")),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,  # nbelastic itself
    "<frozen",
)
_PACKAGES = r"[^\"\n]*/(?:site|dist)-packages/"  # wherever they are: a user's own, a parent environment's
_BELOW = ("/ipyparallel/", "/ipykernel/", "/IPython/", "/nbelastic/programs/program.py")  # what runs the user's program
_LOOP = "/nbelastic/programs/elastic.py"


def whereabouts() -> str:
    """Its innermost frame that is neither a library's nor ours, as `train.py:88 in load`; empty if there is none."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    own = [frame for frame in _above(main) if _is_the_users(frame)]
    return _in_words(own[-1]) if own else ""


def stack() -> str:
    """The main thread's Python stack, innermost call last, and that of each other thread that runs the user's code."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [_format(_above(frames.pop(threading.main_thread().ident or 0, None)))]
    for ident, frame in frames.items():
        whole = _above(frame)
        if ident != threading.get_ident() and any(map(_is_the_users, whole)):
            parts.append(f"Thread {names.get(ident, ident)}:\n{_format(whole)}")
    return "\n".join(parts)[-STACK_BOUND:]


def _above(frame: FrameType | None) -> list[FrameType]:
    """The stack from the outermost frame to this one, without what is below the user's program."""
    found = []
    while frame is not None and not any(part in frame.f_code.co_filename for part in _BELOW):
        if not frame.f_code.co_filename.endswith(_LOOP):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _format(frames: list[FrameType]) -> str:
    if not any(map(_is_the_users, frames)):
        return "It runs no code of yours.\n"
    text = "".join(traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames).format())
    text = re.sub(rf'(?<=File "){_PACKAGES}', "", text)  # torch/nn/modules/module.py says enough
    for folder in _LIBRARIES:
        text = text.replace(f'"{folder}', '"')
    return text


def _is_the_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith(_LIBRARIES) and re.match(_PACKAGES, file) is None


def _in_words(frame: FrameType) -> str:
    code = frame.f_code
    name = os.path.basename(code.co_filename)
    if "ipykernel_" in code.co_filename or name.startswith("<ipython-input"):
        name = "cell"
    return f"{name}:{frame.f_lineno}" + (f" in {code.co_name}" if not code.co_name.startswith("<") else "")
