"""Where the threads of this process are, as another thread sees it."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
import traceback
from functools import lru_cache
from types import FrameType

MAX_STACK = 64_000  # characters
# The whole path: a folder of the user may have its name.
NBELASTIC = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (
    *dict.fromkeys(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib")),
    NBELASTIC,
    "<frozen",
)
_PACKAGES = r"[^\"\n]*/(?:site|dist)-packages/"  # of any environment: the user's own, a parent environment
# They call the program, or wait for one.
_CALLERS = (
    "/ipyparallel/",
    "/ipykernel/",
    "/IPython/",
    "/nbelastic/programs/program.py",
    "/nbelastic/programs/boot.py",
)
_LOOP = "/nbelastic/programs/elastic.py"


def current_line() -> str:
    """The main thread's innermost line of user code, as `train.py:88 in load`; empty if it runs none."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    own = [frame for frame in _frames_of_program(main) if _is_user_code(frame)]
    return format_line(own[-1]) if own else ""


def stack_dump() -> str:
    """The main thread's Python stack, innermost call last, and that of each other thread which runs user code."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [_format_stack(_frames_of_program(frames.pop(threading.main_thread().ident or 0, None)))]
    for ident, frame in frames.items():
        stack = _frames_of_program(frame)
        if ident != threading.get_ident() and any(map(_is_user_code, stack)):
            parts.append(f"Thread {names.get(ident, ident)}:\n{_format_stack(stack)}")
    return "\n".join(parts)[-MAX_STACK:]


def _frames_of_program(frame: FrameType | None) -> list[FrameType]:
    """The frames from the program's outermost one to this one."""
    found = []
    while frame is not None and not any(part in frame.f_code.co_filename for part in _CALLERS):
        if not frame.f_code.co_filename.endswith(_LOOP):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def user_frames(inner: FrameType | None = None) -> list[FrameType]:
    """The frames of user code up to this one (by default: of the calling thread), the outermost first."""
    return [frame for frame in _frames_of_program(inner or sys._getframe()) if _is_user_code(frame)]


def is_in_user_code(frame: FrameType | None) -> bool:
    """Whether user code runs here, or what it has called of other libraries than nbelastic."""
    while frame is not None and not _is_user_code(frame):
        if frame.f_code.co_filename.startswith(NBELASTIC):
            return False
        frame = frame.f_back
    return frame is not None


def _format_stack(frames: list[FrameType]) -> str:
    if not any(map(_is_user_code, frames)):
        return "no user code is running\n"
    text = "".join(traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames).format())
    text = re.sub(rf'(?<=File "){_PACKAGES}', "", text)  # torch/nn/modules/module.py is enough
    for folder in _LIBRARIES:
        text = text.replace(f'"{folder}', '"')
    return text


def _is_user_code(frame: FrameType) -> bool:
    return is_user_file(frame.f_code.co_filename)


@lru_cache(4096)
def is_user_file(file: str) -> bool:
    """Whether this file belongs to no installed package."""
    return not file.startswith(_LIBRARIES) and re.match(_PACKAGES, file) is None


def format_line(frame: FrameType) -> str:
    """A line as `train.py:88 in load`."""
    code = frame.f_code
    name = os.path.basename(code.co_filename)
    if "ipykernel_" in code.co_filename or name.startswith("<ipython-input"):
        name = "cell"
    return f"{name}:{frame.f_lineno}" + (f" in {code.co_name}" if not code.co_name.startswith("<") else "")
