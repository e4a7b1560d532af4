"""What the driver's process receives at its start, and what it reports then."""

from __future__ import annotations

from typing import Any

import msgspec

from nbelastic.protocol.settings import Settings
from nbelastic.protocol.timeouts import DRIVER_START


class Start(msgspec.Struct, frozen=True):
    """Client → the driver's process, on its standard input: run the driver of this cluster."""

    settings: Settings
    arguments: dict[str, Any]  # of `Cluster`, as the driver snapshot has them
    takes_over: bool = False  # the cluster had another driver
    submitted: int = 0  # jobs so far
    timeout: float = DRIVER_START  # seconds in which the process must be ready
    temporary_folder: str = ""  # the client's
    ready_fd: int = -1  # the descriptor of the pipe for the `StartReport`


class StartReport(msgspec.Struct, frozen=True):
    """The driver's process → client: the driver is ready; or the class, of `nbelastic.errors`, and text of an error."""

    error: str = ""
    text: str = ""
