"""Open files: how many a process may have, and how many workers that allows on the driver's machine."""

from __future__ import annotations

import os
import resource

MOST = 65536  # enough for 10,000 workers; processes that go through all numbers up to the limit stay quick
OF_CONTROLLER, PER_ENGINE = 128, 6  # ipyparallel's controller: without engines (measured: 108), and for each
OF_DRIVER, PER_WORKER = (
    96,
    1.5,
)  # the driver: for the cluster (measured: 72), and for each worker (measured: 1.4, when each had a connection)


def raise_limit() -> int:
    """Raise this process's soft limit of open files towards the hard one, at most to `MOST`. Returns the limit.

    Processes that are started later inherit it. The usual soft limit, 1024, is there for programs that call `select`;
    one of those fails only if it opens more files than that, and would have failed with the lower limit, too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def room(limit: int, used: int | None = None) -> int:
    """How many workers fit if a process may have `limit` open files. `used`: how many this process has already."""
    used = len(os.listdir("/proc/self/fd")) if used is None else used
    controller = (limit - OF_CONTROLLER) // PER_ENGINE
    driver = int((limit - used - OF_DRIVER) / PER_WORKER)
    return max(0, min(controller, driver))
