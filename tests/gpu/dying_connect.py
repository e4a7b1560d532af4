"""Preloaded into the workers' template: a newcomer that finds `die-init` dies while NCCL, or its double, connects."""

from __future__ import annotations

import os
import threading
from typing import Any

from nbelastic.worker import accelerator, session
from tests.gpu.programs import DELAY, die, dies


class DyingInConnect:
    """NCCL, except for that death."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def connect(self, backend: Any, meet: Any) -> None:
        folder = os.environ["NBELASTIC_TEST_FOLDER"]
        if dies(folder, "init", chosen=not session.current().facts.holds_state):
            threading.Timer(DELAY, die, (folder, "init")).start()
        self._inner.connect(backend, meet)


accelerator.NCCL = DyingInConnect(accelerator.NCCL)
