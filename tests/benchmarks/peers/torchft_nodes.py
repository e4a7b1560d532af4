"""A torchft replica per node: `… torchft_nodes FOLDER WORKERS MIN`, orders on standard input.

The lighthouse has the settings of torchft's README, and is not on any node.
"""

from __future__ import annotations

import sys

from torchft.coordination import LighthouseServer

from tests.benchmarks.peers.nodes import ProcessNodes, until_sigterm


def main() -> None:
    folder, workers, minimum = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=int(minimum), join_timeout_ms=10_000, quorum_tick_ms=100
    )
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"

    def command(node: int) -> list[str]:
        module = "tests.benchmarks.peers.torchft_replica"
        return [sys.executable, "-m", module, folder, str(node), address, minimum]

    try:
        until_sigterm(ProcessNodes(command, is_worker=True), workers)
    finally:
        lighthouse.shutdown()


if __name__ == "__main__":
    main()
