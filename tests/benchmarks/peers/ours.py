"""nbelastic as a script uses it: `python -m tests.benchmarks.peers.ours FOLDER WORKERS`, until SIGTERM."""

from __future__ import annotations

import signal
import sys

import nbelastic as nbe
from tests.benchmarks import programs


def main() -> None:
    folder, workers = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with nbe.Cluster(f"localhost:{workers}", min=1, max=workers, cooldown=(0, 0)) as cluster:
        job = cluster.run(programs.record_steps, folder, 10**9)
        try:
            job.wait()
        finally:
            job.stop()
            job.wait(timeout=20)


if __name__ == "__main__":
    main()
