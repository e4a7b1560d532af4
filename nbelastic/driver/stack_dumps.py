"""Stack dumps: asks every worker where its threads are, and collects the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from nbelastic.core.state import ClusterState, WorkerState
from nbelastic.driver.pending import Pending
from nbelastic.driver.telemetry import Telemetry
from nbelastic.driver.workers import Workers
from nbelastic.protocol import worker_messages
from nbelastic.protocol.status import Status, WorkerStack


def collect_stack_dumps(
    cluster: ClusterState,
    workers: Workers,
    telemetry: Telemetry,
    pending: Pending,
    *,
    status: Callable[[], Status],
    timeout: float,
    result: Future[list[WorkerStack]],
) -> None:
    """Ask all workers; resolve `result` when all have answered, or after `timeout` seconds. Runs in the driver's thread.

    The workers' connection threads answer, so a blocked main thread does not prevent an answer.
    """
    telemetry.stack_requests += 1
    number = telemetry.stack_requests
    asked = [w for w, worker in cluster.workers.items() if worker.state is not WorkerState.STARTING]
    timed_out = False

    def collect(cluster: ClusterState) -> list[WorkerStack] | None:
        answers = {w: answer for w, answer in telemetry.stacks.items() if answer.number >= number}
        if not timed_out and any(w not in answers for w in asked if w in cluster.workers):
            return None
        rows = {worker.id: worker for worker in status().workers}
        stacks = []
        for w in (w for w in asked if str(w) in rows):
            row, answer = rows[str(w)], answers.get(w, worker_messages.StackShown(w, number, "", ""))
            commits = f"{row.behind} commit{'s' if row.behind > 1 else ''} behind"
            note = (row.reason or commits) if row.behind else ""
            stacks.append(WorkerStack(row.id, row.rank, answer.place, answer.text, note))
        return sorted(stacks, key=lambda stack: (stack.rank is None, stack.rank, stack.worker))

    def on_timeout() -> None:
        nonlocal timed_out
        timed_out = True
        pending.check_and_publish()

    workers.send(asked, worker_messages.ShowStack(number))
    pending.resolve(result, collect)
    asyncio.get_running_loop().call_later(timeout, on_timeout)
