"""Leases of a driver for tests: a process that has one ends with the test."""

from __future__ import annotations

import os
from pathlib import Path

from nbelastic.system.driver_lease import DriverLease
from nbelastic.system.process_identity import identity


def until_the_end(folder: Path) -> DriverLease:
    """Of a cluster that this process owns."""
    return named(folder, 60.0, owner=identity(os.getpid()))


def named(folder: Path, lease: float, owner: str = "") -> DriverLease:
    """This process writes its identity as the driver's."""
    file = folder / "driver"
    file.write_text(identity(os.getpid()))
    return DriverLease(str(file), lease, owner, "")
