"""Identities of processes, as `pid@start`: the system uses a pid again, but with another start time."""

from __future__ import annotations

import os

from nbelastic.system.processes import stat_of


def identity(pid: int) -> str:
    """The identity of a process; empty if it has ended."""
    state, *fields = stat_of(pid)
    return "" if state in "ZX" else f"{pid}@{fields[18]}"  # field 22: start, in clock ticks since the machine's start


def pid_of(process: str) -> int:
    """The pid in an identity; 0 if `process` is empty or not an identity."""
    pid = process.partition("@")[0]
    return int(pid) if pid.isdecimal() else 0


def is_alive(process: str) -> bool:
    """Whether the process with this identity runs."""
    return bool(process) and identity(pid_of(process)) == process


def pidfd_of(process: str) -> int:
    """A descriptor that becomes readable when the process with this identity ends. ProcessLookupError if it has ended."""
    fd = os.pidfd_open(pid_of(process))
    if not is_alive(process):  # another process has its pid now
        os.close(fd)
        raise ProcessLookupError
    return fd
