"""nbelastic with a host per node, each with one worker: `… our_nodes FOLDER WORKERS MIN`, orders on standard input.

The hosts are loopback addresses of this machine, with an agent and a template each.
"""

from __future__ import annotations

import signal
import sys

import psutil

import nbelastic as nbe
from tests.benchmarks import programs
from tests.benchmarks.peers.nodes import kill_all, obey


def host(node: int) -> str:
    return f"127.0.0.{node + 2}"


class HostNodes:
    def __init__(self, cluster: nbe.Cluster, job: nbe.Job) -> None:
        self._cluster, self._job = cluster, job

    def join(self, node: int) -> None:
        self._cluster.add_host(f"{host(node)}:1")

    def leave(self, node: int) -> None:
        """Kill the agent and all that it has started; then take the host off the list, or the driver starts it again."""
        for pid in self._pids(node):
            agent = psutil.Process(pid).parent().parent()
            kill_all([agent, *agent.children(recursive=True)])
        self._cluster.remove_host(host(node), now=True)

    def kill(self, node: int) -> None:
        kill_all([psutil.Process(pid) for pid in self._pids(node)])

    def tend(self) -> None:
        if self._job.done():
            raise SystemExit(f"the job has ended: {self._job.exception()}")

    def _pids(self, node: int) -> list[int]:
        return [worker.pid for worker in self._cluster.workers if worker.host == host(node) and worker.pid]


def main() -> None:
    folder, workers, minimum = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    hosts = ",".join(f"{host(node)}:1" for node in range(workers))
    with nbe.Cluster(hosts, min=minimum, max=workers, cooldown=(0, 0)) as cluster:
        job = cluster.run(programs.record_steps, folder, 10**9)
        try:
            obey(HostNodes(cluster, job))
        finally:
            job.stop()
            job.wait(timeout=20)


if __name__ == "__main__":
    main()
