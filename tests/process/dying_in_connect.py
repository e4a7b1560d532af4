"""Preloaded: a newcomer that finds the file `$DIE` dies while NCCL's double connects, before its first connection."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbelastic.worker import session
from tests.support.nccl_double import install  # noqa: F401  (it replaces `accelerator.NCCL`)
from tests.support.nccl_double.accelerator import Double

_connect = Double.connect


def connect(self: Double, communicator: Any, meet: Callable[[], object]) -> None:
    def meet_and_die() -> None:
        meet()
        die = Path(os.environ["DIE"])
        if die.exists() and not session.current().facts.holds_state:
            die.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    _connect(self, communicator, meet_and_die)


Double.connect = connect  # type: ignore[method-assign]
