"""nbelastic as a script uses it: `python -m tests.benchmarks.peers.ours FOLDER WORKERS`, until SIGTERM."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

import nbelastic as nbe
from tests.benchmarks import programs


def train(program: Callable[..., Any], folder: str, workers: int) -> None:
    """Run `program(folder, steps)` on so many workers of this machine, until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with nbe.Cluster(f"localhost:{workers}", min=1, max=workers, cooldown=(0, 0)) as cluster:
        job = cluster.run(program, folder, 10**9)
        try:
            job.wait()
        finally:
            job.stop()
            job.wait(timeout=20)


if __name__ == "__main__":
    train(programs.record_steps, sys.argv[1], int(sys.argv[2]))
