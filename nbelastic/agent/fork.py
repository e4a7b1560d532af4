"""Fork a process from the template, also when the template has just been killed."""

from __future__ import annotations

import errno
import itertools
import os
import select
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, forkserver, util
from multiprocessing.process import BaseProcess

from nbelastic.system.processes import is_ending

TEMPLATE_END_TIMEOUT = 5.0  # seconds in which a template ends that has closed its sockets
NOTHING_LEFT = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)  # no open file, process or memory
TRIES = 3  # if so many templates die, the next one would die of the same cause


def shorten_addresses() -> None:
    """Name the sockets of this process's templates by descriptor: the path of the temporary folder may be too long for a unix socket.

    Slurm may make a temporary folder per job, for example. Nodes of scripts, which are other processes, use these addresses too.
    """
    fd, numbers = os.open(util.get_temp_dir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), itertools.count()
    folder = f"/proc/{os.getpid()}/fd/{fd}"
    vars(connection)["arbitrary_address"] = lambda _: f"{folder}/template-{next(numbers)}"


class ForkRefusedError(Exception):
    """The template runs and could not fork, or none could be started: no process, memory or open file is left."""


def fork(make: Callable[[], BaseProcess]) -> BaseProcess:
    """Start the process that `make` returns. It is called once per try. Raises ForkRefusedError.

    A killed template closes its sockets a moment before it can be waited for. In between, multiprocessing believes that the
    template runs, and raises. Then wait for its end, and start another template. One that lives and has closed this connection only
    is not waited for: the agent has other workers.
    """
    for tries in range(1, TRIES + 1):
        try:
            forkserver.ensure_running()
            template = vars(forkserver._forkserver)["_forkserver_pid"]
            process = make()
            process.start()
        except (EOFError, ConnectionError) as error:
            listens = not isinstance(error, ConnectionRefusedError)
            if (listens and not is_ending(template)) or not _wait_for_end(template):
                raise ForkRefusedError("the template could not fork: no process or memory is left here") from error
            if tries == TRIES:
                raise
        except OSError as error:
            if error.errno not in NOTHING_LEFT:
                raise
            raise ForkRefusedError(f"the template could not fork: {error}") from error
        else:
            break
    return process


def _wait_for_end(template: int) -> bool:
    """Whether the template has ended, within the timeout."""
    with suppress(ProcessLookupError):  # multiprocessing has waited for it already
        fd = os.pidfd_open(template)
        try:
            return bool(select.select([fd], [], [], TEMPLATE_END_TIMEOUT)[0])
        finally:
            os.close(fd)
    return True
