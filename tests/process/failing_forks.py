"""A module to preload: the template cannot make its fourth fork, as if the limit of processes were reached."""

import errno
import os

forks, fork = [], os.fork


def _fork() -> int:
    forks.append(None)
    if len(forks) == 4:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()


os.fork = _fork
