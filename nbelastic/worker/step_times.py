"""How long this rank's steps take without the time in which it waits for others.

All ranks of a synchronous training have equally long steps: the fast ones wait in collectives for the slow one. The link's thread
samples where the main thread is. The main thread waits for others while it is inside torch.distributed or DDP, and
while it sleeps in a backward pass.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from functools import lru_cache
from types import FrameType

from nbelastic.protocol.rank_reports import OwnTime
from nbelastic.worker.hang_detector import read_stat
from nbelastic.worker.user_stack import NBELASTIC, format_line, is_user_file

PERIOD = 0.05  # seconds between two samples
WINDOW = 5.0  # seconds between two reports
FEWEST = 40  # samples of a report
WAITING_FILES = ("/torch/distributed/", "/torch/nn/parallel/")  # and our own
BACKWARD_FILES = "/torch/autograd/"
LOADER_FILES = "/torch/utils/data/"


class StepTimes:
    """Lives in the link's thread. It uses no group: a reference to one at the wrong moment would hang its end."""

    def __init__(self) -> None:
        self._begin(0, 0, time.monotonic())

    def _begin(self, generation: int, commits: int, now: float) -> None:
        self._generation, self._commits, self._since = generation, commits, now
        self._waiting = 0  # samples
        self._places: Counter[str] = Counter()  # of the other samples

    def sample(self) -> None:
        """Note where the main thread is."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None:
            return
        file = frame.f_code.co_filename
        if _is_waiting_file(file) or (BACKWARD_FILES in file and read_stat(os.getpid())[0] == "S"):
            self._waiting += 1
        else:
            self._places[_place(frame)] += 1

    def take(self, now: float, generation: int, commits: int) -> OwnTime | None:
        """The mean of the last seconds, every few seconds; None if a generation began or ended meanwhile."""
        elapsed, steps = now - self._since, commits - self._commits
        if generation != self._generation or steps < 0:
            self._begin(generation, commits, now)
            return None
        own, waiting, places = self._places.total(), self._waiting, self._places
        if elapsed < WINDOW or own + waiting < FEWEST or not steps:
            return None
        self._begin(generation, commits, now)
        step = elapsed * 1000 / steps
        place = places.most_common(1)[0][0] if places else ""
        return OwnTime(generation, round(step, 2), round(step * own / (own + waiting), 2), place)


@lru_cache(1024)
def _is_waiting_file(file: str) -> bool:
    return file.startswith(NBELASTIC) or any(part in file for part in WAITING_FILES)


def _place(frame: FrameType | None) -> str:
    """The innermost line of the user's code, and whether a DataLoader is at work."""
    line, loads = "", False
    while frame is not None:
        file = frame.f_code.co_filename
        loads = loads or LOADER_FILES in file
        if not line and is_user_file(file):
            line = format_line(frame)
        frame = frame.f_back
    return f"its data loader, {line}" if loads and line else line
