"""How long a process of a cluster runs on without a driver. It reads from a file which process is the driver."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from nbelastic.system.process_identity import is_alive

POLL = 1.0  # seconds between two reads of the file


class DriverLease(NamedTuple):
    """What a process that may outlive its driver knows about drivers.

    `file`: the driver writes its identity there. `lease`: seconds that the process waits for another driver. `owner`: the
    identity of the kernel with which the cluster ends; empty if there is none. `number`: of the cluster's start: another
    cluster may use the same name, and so the same file, later.
    """

    file: str
    lease: float
    owner: str
    number: str

    @property
    def name(self) -> str:
        """The cluster's name."""
        return Path(self.file).name.removesuffix(".lock")

    @property
    def owner_has_ended(self) -> bool:
        return bool(self.owner) and not is_alive(self.owner)

    @property
    def driver(self) -> str | None:
        """The identity of the newest driver, which may have ended. None if the cluster has ended.

        A cluster has ended when its file is missing, or has the number of another cluster.
        """
        try:
            driver, _, number = Path(self.file).read_text().partition(" ")
        except FileNotFoundError:
            return None
        return driver if number in ("", self.number) else None


class LeaseWatch:
    """Whether a process of the cluster must end, by calls of `has_expired` at least every few seconds."""

    def __init__(self, driver_lease: DriverLease) -> None:
        self._lease, self._seen = driver_lease, time.monotonic()

    def has_expired(self, now: float) -> bool:
        """The cluster has ended, or its driver is dead and the lease has expired or the owner has ended.

        If that cannot be read, because strangers have taken the last descriptor of this process, only the lease counts.
        """
        try:
            driver = self._lease.driver
            if driver is None:
                return True
            if is_alive(driver):
                self._seen = now
                return False
            owner_has_ended = self._lease.owner_has_ended
        except OSError:
            owner_has_ended = False
        return now - self._seen > self._lease.lease or owner_has_ended


def wait_for_lease_expiry(driver_lease: DriverLease) -> None:
    """Return when a process of the cluster must end: see `LeaseWatch`."""
    watch = LeaseWatch(driver_lease)
    while not watch.has_expired(time.monotonic()):
        time.sleep(POLL)
