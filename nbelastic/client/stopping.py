"""Stops a cluster or leaves it.

A driver that does not stop in time is killed. What a dead driver has left running is ended.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from nbelastic.client.connection import Connection
from nbelastic.client.driver_link import DriverLink
from nbelastic.client.find_driver import kill_driver
from nbelastic.client.notebook_line import show_in_one_line
from nbelastic.errors import DriverLostError, NbelasticError
from nbelastic.protocol import requests
from nbelastic.protocol.settings import check
from nbelastic.protocol.timeouts import STOP_AT_KERNEL_END

CLOSING_TIMEOUT = 10.0  # seconds in which everything but the programs has to end
KERNEL_END_TIMEOUT = 2.0  # seconds in which a cluster has to stop when the kernel ends, which allows no more
EXIT_TIMEOUT = 2.0  # seconds in which a process ends that has nothing more to do
LONGEST_TIMEOUT = 1e9  # seconds that a user may choose
KILLED = "the stop no longer waits for the programs: they are killed."  # after Ctrl-C
MAX_SUCCESSORS = 3  # drivers that are asked to stop after the first one has died


def stop_cluster(link: DriverLink, timeout: float | None, *, by: str) -> None:
    """Stop the cluster, if it runs; programs have `timeout` seconds to end (default: `stop_timeout`)."""
    fits = timeout is None or 0 <= timeout <= LONGEST_TIMEOUT
    check(fits, f"timeout={timeout}: a number of seconds, at least 0.")
    program_timeout = link.configuration.settings.limits.timeouts.stop if timeout is None else timeout
    try:
        _stop(link, program_timeout, CLOSING_TIMEOUT, by=by, kill=True)
    except KeyboardInterrupt as error:
        show_in_one_line(error, KILLED)
        raise


@contextlib.contextmanager
def stopped_on_error(link: DriverLink) -> Iterator[None]:
    """Stop the cluster if this block raises, or is interrupted."""
    try:
        yield
    except BaseException:
        stop_cluster(link, None, by="hand")
        raise


def close_cluster(link: DriverLink) -> None:
    """Stop a cluster that ends with its kernel; detach any other."""
    if not link.is_connected:
        if link.is_lost and link.ends_with_kernel:
            link.kill_leftovers()
        link.release()
    elif link.ends_with_kernel:
        # A driver that takes longer ends soon after the kernel.
        _stop(link, STOP_AT_KERNEL_END, KERNEL_END_TIMEOUT - STOP_AT_KERNEL_END, by="hand", kill=False)
    else:
        detach_cluster(link)


def detach_cluster(link: DriverLink) -> None:
    """Leave a cluster, which lives on. UsageError for one that ends with its kernel, unless its driver is lost."""
    if link.is_lost:
        link.release()
        return
    link.running()
    check(not link.ends_with_kernel, f"the cluster {link.name!r} is not kept: start it with keep=True.")
    link.detach(f"the cluster {link.name!r} was detached: attach to it again")


def request_stop(link: DriverLink, by: str) -> None:
    """Ask the driver to stop the cluster or, if it dies before it answers, the next driver."""

    def ask_again_if_lost(answer: Future[Any]) -> None:
        if isinstance(answer.exception(), DriverLostError):
            with contextlib.suppress(NbelasticError):
                request_stop(link, by)

    link.running().request(requests.Stop(by)).add_done_callback(ask_again_if_lost)


def _stop(link: DriverLink, program_timeout: float, closing_timeout: float, *, by: str, kill: bool) -> None:
    """Stop the cluster, if it runs. Ctrl-C ends the programs at once.

    Programs have `program_timeout` seconds to end, and the rest `closing_timeout` seconds after that. Then, with `kill`, the
    driver is killed.
    """
    driver, link.connection = link.connection, None
    if driver is None or driver.forked:
        return
    try:
        _end_driver(link, driver, requests.Stop(by, program_timeout), closing_timeout, kill=kill)
    except KeyboardInterrupt:
        _end_driver(link, driver, requests.Stop(by, 0.0), closing_timeout, kill=kill)
        raise
    finally:
        link.release()


def _end_driver(
    link: DriverLink, driver: Connection, stop: requests.Stop, closing_timeout: float, *, kill: bool
) -> None:
    timeout = (stop.within or 0.0) + closing_timeout
    driver.request(stop)
    driver.finished.wait(timeout)
    if not driver.finished.is_set() and kill:
        kill_driver(link.run_folder, link.run_folder.driver)
        driver.finished.wait(closing_timeout)
    for _ in range(MAX_SUCCESSORS):
        if not driver.died:
            break
        # At the kernel's end there is no time to start another driver.
        successor = driver.successor or (link.find_successor(driver) if kill else None)
        if successor is None:
            link.kill_leftovers()
            break
        link.newest = driver = successor
        successor.use(link.handle_change)
        successor.request(stop)
        successor.finished.wait(timeout)
    if link.process is not None and driver.finished.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            link.process.wait(EXIT_TIMEOUT)
