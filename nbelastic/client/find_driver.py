"""Finds the running driver of a cluster, connects to it, and can kill it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from nbelastic.client.connection import Connection
from nbelastic.errors import AnotherDriverError, UsageError
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.protocol.timeouts import DRIVER_START

T = TypeVar("T")
CONNECT_INTERVAL = 0.02  # seconds between two attempts to connect to a driver that starts or ends
START_INTERVAL = 0.05  # seconds between two attempts to attach while another kernel starts the driver
KILL_TIMEOUT = 10.0  # seconds to wait for the end of a killed driver


def connect_to_driver(
    folder: Path, timeout: float = DRIVER_START, predecessor: Connection | None = None
) -> Connection | None:
    """Connect to the driver whose run folder this is. Return None if it is dead, or had a fault and was killed.

    `predecessor`: see `Connection`. UsageError if the driver does not listen within `timeout` seconds, does not answer, has
    another version, or manages another cluster than `predecessor` did.
    """
    run_folder = RunFolder(folder.name)
    end = time.monotonic() + timeout
    while True:
        pid = run_folder.driver
        if not pid:
            return None
        try:
            connection = Connection(folder, predecessor=predecessor)
        except (ConnectionError, FileNotFoundError, BlockingIOError):  # it is about to listen, or to end, or is stopped
            if time.monotonic() > end:
                raise no_answer_error(folder.name, pid) from None
            time.sleep(CONNECT_INTERVAL)
        except TimeoutError:
            raise no_answer_error(folder.name, pid) from None
        else:
            break
    if predecessor is not None and connection.number != predecessor.number:
        connection.leave("it is another cluster's")
        raise name_reused_error(folder.name)
    if connection.fault:
        connection.leave("its driver had a fault and was ended")
        kill_driver(run_folder, pid)
        return None
    return connection


def retry_while_another_starts(attempt: Callable[[], T]) -> T:
    """Return `attempt()`; repeat it while another kernel starts the driver at the same moment."""
    end = time.monotonic() + DRIVER_START
    while True:
        try:
            return attempt()
        except AnotherDriverError:
            if time.monotonic() > end:
                raise
            time.sleep(START_INTERVAL)


def name_reused_error(name: str) -> UsageError:
    """Create the error for a client that has lost its driver and finds a new cluster under the same name."""
    return UsageError(f"another cluster has the name {name!r} now.")


def no_answer_error(name: str, pid: int) -> UsageError:
    """Create the error for a client that attaches to a driver that does not answer."""
    text = f"the driver of the cluster {name!r} does not answer (process {pid}): it is stopped or busy"
    return UsageError(f"{text}; end that process, then attach again.")


def kill_driver(run_folder: RunFolder, pid: int) -> None:
    """Kill this process if it still holds the cluster's name, and wait until it has ended."""
    if not pid:
        return
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            if run_folder.driver == pid:  # another process may have the number, or the name, by now
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                ended = select.poll()
                ended.register(fd, select.POLLIN)
                ended.poll(KILL_TIMEOUT * 1000)
        finally:
            os.close(fd)
