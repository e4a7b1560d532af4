"""Is a cluster's driver there? Its processes that outlive a kernel look at the file in which the driver names itself."""

from __future__ import annotations

import time
from pathlib import Path

LOOK = 1.0  # seconds between looks


def identity(pid: int) -> str:
    """The process as `pid@start`: numbers are used again, with another start. Empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else f"{pid}@{fields[18]}"  # field 22: clock ticks from the machine's start


def lives(who: str) -> bool:
    """Whether the process of this identity does."""
    pid = who.partition("@")[0]
    return pid.isdecimal() and identity(int(pid)) == who


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
