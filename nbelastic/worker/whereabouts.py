"""Where the main thread is in the user's own code, asked from another thread."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from types import FrameType

_NOT_THE_USERS = (
    *{sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")},
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,  # nbelastic
    "<frozen",
)


def whereabouts() -> str:
    """Its innermost frame that is neither a library's nor ours, as `train.py:88 in load`; empty if there is none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return _in_words(frame) if frame is not None else ""


def _in_words(frame: FrameType) -> str:
    code = frame.f_code
    name = os.path.basename(code.co_filename)
    if "ipykernel_" in code.co_filename or name.startswith("<ipython-input"):
        name = "cell"
    return f"{name}:{frame.f_lineno}" + (f" in {code.co_name}" if not code.co_name.startswith("<") else "")
