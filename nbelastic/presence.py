"""Is a cluster's driver there? Its processes that outlive a kernel look at the file in which the driver names itself."""

from __future__ import annotations

import time
from pathlib import Path

from nbelastic.processes import stat_of

LOOK = 1.0  # seconds between looks


def identity(pid: int) -> str:
    """The process as `pid@start`: numbers are used again, with another start. Empty if there is none."""
    state, *fields = stat_of(pid)
    return "" if state in "ZX" else f"{pid}@{fields[18]}"  # field 22: clock ticks from the machine's start


def pid_of(who: str) -> int:
    """The process number in an identity; 0 if that is empty, or is none."""
    pid = who.partition("@")[0]
    return int(pid) if pid.isdecimal() else 0


def lives(who: str) -> bool:
    """Whether the process of this identity does."""
    return bool(who) and identity(pid_of(who)) == who


def outlast(file: Path, lease: float) -> None:
    """Return when for `lease` seconds no living process was named in `file`, or when the file is gone."""
    seen = time.monotonic()
    while True:
        try:
            who = file.read_text()
        except FileNotFoundError:
            return
        now = time.monotonic()
        if lives(who):
            seen = now
        elif now - seen > lease:
            return
        time.sleep(LOOK)
