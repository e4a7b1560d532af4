"""The line that every peer writes for each completed step: the same as `programs.record_steps` writes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


class StepLog:
    """One file per process in `folder`; each line is written to the file before the next step begins."""

    def __init__(self, folder: str) -> None:
        self._file = (Path(folder) / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def write(self, *, step: int, rank: int | None, world: int) -> None:
        line = {"t": time.time(), "step": step, "rank": rank, "world": world, "pid": os.getpid()}
        self._file.write(json.dumps(line) + "\n")
