"""What the agent has the template fork, also when the template has just been killed."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess

DYING = 5.0  # seconds that a killed template may take until it can be waited for
TRIES = 3  # a template that dies each time has a cause that a further one has too


def fork(make: Callable[[], BaseProcess]) -> BaseProcess:
    """Start the process that `make` describes.

    A killed template closes its sockets first and can be waited for a moment later. In between multiprocessing takes it
    for one that lives, and raises. Then another template is started, and forks the process that `make` describes next.
    """
    for tries in range(1, TRIES + 1):
        forkserver.ensure_running()
        template = vars(forkserver._forkserver)["_forkserver_pid"]
        process = make()
        try:
            process.start()
        except (EOFError, ConnectionError):
            if tries == TRIES or not _ends(template):
                raise
        else:
            break
    return process


def _ends(template: int) -> bool:
    with suppress(ProcessLookupError):  # it was waited for already
        fd = os.pidfd_open(template)
        try:
            return bool(select.select([fd], [], [], DYING)[0])
        finally:
            os.close(fd)
    return True
