"""What processes look at that outlive a driver, where there is none: they end with the test."""

from __future__ import annotations

import os
from pathlib import Path

from nbelastic.system.presence import Presence, identity


def until_the_end(folder: Path) -> Presence:
    """This process is the kernel that owns them."""
    return named(folder, 60.0, owner=identity(os.getpid()))


def named(folder: Path, lease: float, owner: str = "") -> Presence:
    """This process names itself as the driver."""
    file = folder / "driver"
    file.write_text(identity(os.getpid()))
    return Presence(str(file), lease, owner, "")
