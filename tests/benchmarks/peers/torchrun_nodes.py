"""A torchrun per node, with one worker: `… torchrun_nodes FOLDER WORKERS MIN`, orders on standard input.

All settings favour torchrun. The rendezvous' store lives in this process, because a job ends with the node that has it.
A rendezvous waits 1 s for more nodes instead of 30 s, and notices a lost node after 3 s instead of 15 s.
"""

from __future__ import annotations

import sys

from tests.benchmarks.peers.nodes import ProcessNodes, store_on_loopback, until_sigterm

CONF = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


def main() -> None:
    folder, workers, minimum = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    store = store_on_loopback()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{minimum}:{workers}", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-id", "replay"),
        *("--rdzv-conf", CONF, "--local-addr", "127.0.0.1", "--max-restarts", "100000", "--monitor-interval", "0.1"),
        *("-m", "tests.benchmarks.peers.plain_ddp", folder),
    ]
    until_sigterm(ProcessNodes(lambda _: command, is_worker=False), workers)


if __name__ == "__main__":
    main()
