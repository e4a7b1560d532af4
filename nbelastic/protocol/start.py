"""What the driver's process is told at its start, and what it says then."""

from __future__ import annotations

from typing import Any

import msgspec

from nbelastic.protocol.run_directory import START
from nbelastic.protocol.settings import Settings

AT_THE_END = 0.5  # seconds that programs have when the kernel has ended


class Start(msgspec.Struct, frozen=True):
    """What the process is told. `found`: it takes over what another driver has left. `submitted`: jobs so far. `patience`: seconds
    that it may take to start. `temporary`: the kernel's temporary folder.

    `arguments`: those of `Cluster`, as they are kept. `ready`: the descriptor of a pipe.
    """

    settings: Settings
    arguments: dict[str, Any]
    found: bool = False
    submitted: int = 0
    patience: float = START
    temporary: str = ""
    ready: int = -1


class Refusal(msgspec.Struct, frozen=True):
    """Why there is no driver: the name of an error's class in `nbelastic.errors`, and its text. Both are empty: there is one."""

    error: str = ""
    text: str = ""
