"""Is a cluster's driver there? Its processes that outlive a kernel look at the file in which the driver names itself."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from nbelastic.system.processes import stat_of

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


def end_of(who: str) -> int:
    """A descriptor that becomes readable when the process of this identity ends. ProcessLookupError if it has ended."""
    fd = os.pidfd_open(pid_of(who))
    if not lives(who):  # another one has its number by now
        os.close(fd)
        raise ProcessLookupError
    return fd


class Presence(NamedTuple):
    """By what a process that outlives the driver sees whether there is one: the `file` in which that names itself, the
    `lease`, for how many seconds there may be none, and the `owner`, a kernel without which it is not waited for; empty: no such.
    `number`: of the cluster's start. Another cluster may get its name.
    """

    file: str
    lease: float
    owner: str
    number: str

    @property
    def name(self) -> str:
        """Of the cluster."""
        return Path(self.file).name.removesuffix(".lock")

    @property
    def owned(self) -> bool:
        """False: the owner has ended."""
        return not self.owner or lives(self.owner)

    @property
    def driver(self) -> str | None:
        """The process that named itself last, which may be dead. None: the file is gone, or another cluster's: this one ended."""
        try:
            who, _, number = Path(self.file).read_text().partition(" ")
        except FileNotFoundError:
            return None
        return who if number in ("", self.number) else None


def outlast(presence: Presence) -> None:
    """Return when no driver is there any more, and none will come."""
    seen = time.monotonic()
    while (who := presence.driver) is not None:
        now = time.monotonic()
        if lives(who):
            seen = now
        elif now - seen > presence.lease or not presence.owned:
            return
        time.sleep(LOOK)
