"""Waits for a world: ends when each of its workers has answered since the wait began.

A worker that was killed a moment ago is a member until its host's agent reports the end of its process.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from nbelastic.core.state import ClusterState, WorkerState
from nbelastic.driver.pending import Pending
from nbelastic.driver.telemetry import Telemetry
from nbelastic.driver.workers import Workers
from nbelastic.protocol import worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.status import Status


def ready(cluster: ClusterState) -> tuple[WorkerId, ...]:
    """Those that can run code."""
    return tuple(w for w, worker in cluster.workers.items() if worker.state is WorkerState.READY)


def world(cluster: ClusterState) -> tuple[WorkerId, ...]:
    """The ranks that train or, without a job, the workers that are ready."""
    if cluster.active is not None:
        return cluster.members if cluster.has_world else ()
    return ready(cluster)


class WorldWaits:
    """Lives in the driver's thread."""

    def __init__(self, workers: Workers, telemetry: Telemetry, pending: Pending, status: Callable[[], Status]) -> None:
        self._workers, self._telemetry, self._pending, self._status = workers, telemetry, pending, status

    def wait(self, size: int, result: Future[Status]) -> None:
        """Resolve `result` with the status when there is a world of `size`, and all its workers have answered.

        The workers' connection threads answer. A script's workers do not, so its world counts at once.
        """
        asked: tuple[WorkerId, ...] = ()
        number = 0

        def answered(cluster: ClusterState) -> Status | None:
            nonlocal asked, number
            if cluster.active_script is not None:
                status = self._status()
                return status if status.world_size == size else None
            present = world(cluster)
            if len(present) != size:
                return None
            if present != asked:
                asked, number = present, self._ask(present)
            stacks = self._telemetry.stacks
            return self._status() if all(w in stacks and stacks[w].number >= number for w in present) else None

        self._pending.resolve(result, answered)

    def _ask(self, workers: tuple[WorkerId, ...]) -> int:
        """Ask these workers where they are; returns the number of the question."""
        self._telemetry.stack_requests += 1
        self._workers.send(workers, worker_messages.ShowStack(self._telemetry.stack_requests))
        return self._telemetry.stack_requests
