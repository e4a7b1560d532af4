"""Replaces a driver that has died: the first kernel to notice starts the next one, the others connect to it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from nbelastic.client.configuration import Configuration, configure_again
from nbelastic.client.connection import Connection
from nbelastic.client.find_driver import connect_to_driver, name_reused_error, retry_while_another_starts
from nbelastic.errors import HostError, NbelasticError, UsageError
from nbelastic.protocol.driver_start import Start
from nbelastic.protocol.local_clusters import SnapshotHead, read, start_timeout

MAX_LOSSES, LOSS_PERIOD = 3, 60.0  # drivers that this process replaces, in so many seconds


class DriverReplacement:
    """Finds the next driver of one cluster. It gives up if the cluster's drivers die again and again."""

    def __init__(
        self,
        folder: Path,
        start_driver: Callable[[Start, Connection], Connection],
        configuration: Callable[[], Configuration],
        is_current: Callable[[Connection], bool],
    ) -> None:
        """`is_current` returns whether the cluster still uses a connection, not having been stopped or left."""
        self._folder, self._start_driver = folder, start_driver
        self._configuration, self._is_current = configuration, is_current
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)  # times of a monotonic clock

    def replace(self, lost: Connection) -> Connection | None:
        """Connect to the next driver.

        Return None if the cluster was stopped or left here, has ended, or if its drivers die again and again. Then `lost` has
        the reason.
        """
        hint, attempts = f"its log in {lost.log_dir} may say why", 0
        while self._is_current(lost):
            now = time.monotonic()
            too_often = len(self._losses) == MAX_LOSSES and now - self._losses[0] < LOSS_PERIOD
            if attempts == MAX_LOSSES:
                lost.end_reason += f", and {MAX_LOSSES} other drivers could not take its place: {hint}"
                break
            if too_often:
                lost.end_reason += (
                    f", {MAX_LOSSES + 1} times in {now - self._losses[0]:.0f} s, "
                    f"and is not replaced again before a client attaches: {hint}"
                )
                break
            self._losses.append(now)
            attempts += 1
            try:
                return self._find_or_start(lost)
            except HostError as error:  # the next driver has died too, or cannot start
                hint = str(error)
            except (NbelasticError, OSError) as error:
                lost.end_reason += f", and no other driver could take its place: {error}"
                break
        return None

    def find_or_give_up(self, lost: Connection) -> Connection | None:
        """Try once to connect to the next driver."""
        with contextlib.suppress(NbelasticError, OSError):
            return self._find_or_start(lost)
        return None

    def _find_or_start(self, lost: Connection) -> Connection:
        """UsageError if the cluster has ended meanwhile, or another cluster has its name."""
        return retry_while_another_starts(lambda: self._find_or_start_once(lost))

    def _find_or_start_once(self, lost: Connection) -> Connection:
        timeout = start_timeout(self._folder)
        successor = connect_to_driver(self._folder, timeout, lost)
        if successor is not None:
            return successor
        saved = read(self._folder, SnapshotHead)
        if saved.number != lost.number:
            raise name_reused_error(self._folder.name)
        configuration = self._configuration()
        if saved.arguments != configuration.arguments:  # another kernel has attached with another discovery
            with contextlib.suppress(UsageError):  # for example, its script has been removed
                configuration = configure_again(self._folder.name, saved.log_dir, saved.arguments)
        start = Start(configuration.settings, configuration.arguments, takes_over=True, timeout=timeout)
        return self._start_driver(start, lost)
