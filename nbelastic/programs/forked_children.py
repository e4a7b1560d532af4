"""A process that the user's code forks with `os.fork()` ends with that code, as it would in a script.

Otherwise it would go on as a second worker, with the connections of the first one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from nbelastic.programs.tracebacks import describe
from nbelastic.system.processes import exit_code_of


@contextmanager
def end_forked_children() -> Iterator[Callable[[BaseException | None], None]]:
    """Run the user's code inside. A child that leaves this block, or calls the function that it yields, ends.

    The function takes how the code ended. In the process that began the block it does nothing.
    """
    end = partial(_end_unless, os.getpid())
    try:
        yield end
    except BaseException as error:
        end(error)
        raise
    end(None)


def _end_unless(pid: int, error: BaseException | None) -> None:
    """End this process unless it is `pid`. Its exit status is a script's: 0, that of `sys.exit`, or 1 after an error."""
    if os.getpid() == pid:
        return
    status = 1
    try:
        with suppress(Exception):  # the disk is full
            status = exit_code_of(error if isinstance(error, SystemExit) else SystemExit(error and describe(error)))
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(status)
