"""A fork that fails does not end the template: multiprocessing's fork server would end, and all workers of the host with it.

The limit of processes may be reached, of a user or a container, or the memory may be. The agent learns that this worker could not
be forked, and the others run on.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from multiprocessing import forkserver

from nbelastic.system.log_line import log_line

# How the fork server names the descriptors of a request: the end of the second one is how the agent learns of the failure.
_DESCRIPTORS = ("child_r", "child_w")


def survive_refused_forks() -> None:
    """From now on a fork of this fork server that fails ends that request only. Its forks fork as usual."""
    fork = os.fork

    def fork_or_refuse() -> int:
        try:
            pid = fork()
        except OSError as error:
            request = sys._getframe(1)
            if request.f_code is not forkserver.main.__code__:
                raise
            log_line(f"nbelastic: a worker cannot be forked: {error.strerror}")
            for fd in (*map(request.f_locals.get, _DESCRIPTORS), *request.f_locals.get("fds", ())):
                with suppress(OSError, TypeError):
                    os.close(fd)
            raise ConnectionAbortedError(
                errno.ECONNABORTED, error.strerror
            ) from None  # it goes on after this error alone
        if pid == 0:
            os.fork = fork
        return pid

    os.fork = fork_or_refuse
