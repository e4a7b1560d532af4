"""torchft's lighthouse and its replicas, restarted when they die: `… torchft_group FOLDER REPLICAS`, until SIGTERM.

The lighthouse has the settings of torchft's README. It is a service that runs before the training, so the file `began`
holds the time at which the replicas were started.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from torchft.coordination import LighthouseServer

LOOK = 0.1  # seconds between two checks for dead replicas, as in torchrun


def main() -> None:
    folder, replicas = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"

    def start(number: int) -> subprocess.Popen[bytes]:
        module = "tests.benchmarks.peers.torchft_replica"
        return subprocess.Popen([sys.executable, "-m", module, folder, str(number), address])

    (Path(folder) / "began").write_text(str(time.time()))
    running = [start(number) for number in range(replicas)]
    try:
        while True:
            time.sleep(LOOK)
            running = [process if process.poll() is None else start(number) for number, process in enumerate(running)]
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
        lighthouse.shutdown()


if __name__ == "__main__":
    main()
