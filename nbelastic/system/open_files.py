"""The limit of open files of a process, and how many workers it allows on the driver's machine."""

from __future__ import annotations

import os
import resource

MOST = 65536  # enough for 10,000 workers; a program that closes all numbers up to the limit is still quick
OF_CONTROLLER, PER_ENGINE = 128, 6  # files of ipyparallel's controller: without engines (measured: 108), per engine
OF_DRIVER = 96  # files of a driver without workers (measured: 72)
PER_WORKER = 1.5  # files of the driver per worker (measured: 1.4, when each had a connection)


def raise_limit() -> int:
    """Raise this process's soft limit of open files to its hard limit, at most to `MOST`. Returns the limit.

    Processes that are started later inherit it. The usual soft limit, 1024, protects programs that call `select`. Such a
    program fails only if it opens more files than 1024, and it would fail with the lower limit, too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def most_workers(limit: int, used: int | None = None) -> int:
    """The number of workers that a limit of the driver's open files allows. `used`: files that this process has open already."""
    used = len(os.listdir("/proc/self/fd")) if used is None else used
    return max(0, int((limit - used - OF_DRIVER) / PER_WORKER))


def most_engines(limit: int) -> int:
    """The number of workers that a limit of open files allows ipyparallel's controller to connect."""
    return max(0, (limit - OF_CONTROLLER) // PER_ENGINE)
