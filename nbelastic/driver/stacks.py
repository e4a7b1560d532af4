"""Where every worker is right now: asked of all of them, answered by the threads of their links."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from nbelastic.core.state import ClusterState, WorkerState
from nbelastic.driver.agents import Fleet
from nbelastic.driver.pending import Pending
from nbelastic.protocol import worker_messages
from nbelastic.protocol.status import Status, WorkerStack


def show_stacks(
    cluster: ClusterState,
    fleet: Fleet,
    pending: Pending,
    *,
    status: Callable[[], Status],
    timeout: float,
    found: Future[list[WorkerStack]],
) -> None:
    """In the driver's thread: ask all; resolve `found` when all have answered, or after `timeout` seconds."""
    live = fleet.live
    live.asked += 1
    number = live.asked
    asked = [w for w, worker in cluster.workers.items() if worker.state is not WorkerState.STARTING]
    late = False

    def settle(cluster: ClusterState) -> list[WorkerStack] | None:
        answered = {w: said for w, said in live.stacks.items() if said.number >= number}
        if not late and any(w not in answered for w in asked if w in cluster.workers):
            return None
        rows = {worker.id: worker for worker in status().workers}
        found = []
        for w in (w for w in asked if str(w) in rows):
            row, said = rows[str(w)], answered.get(w, worker_messages.StackShown(w, number, "", ""))
            commits = f"{row.behind} commit{'s' if row.behind > 1 else ''} behind"
            note = (row.reason or commits) if row.behind else ""
            found.append(WorkerStack(row.id, row.rank, said.place, said.text, note))
        return sorted(found, key=lambda stack: (stack.rank is None, stack.rank, stack.worker))

    def give_up() -> None:
        nonlocal late
        late = True
        pending.check_and_publish()

    fleet.to_workers(asked, worker_messages.ShowStack(number))
    pending.resolve(found, settle)
    asyncio.get_running_loop().call_later(timeout, give_up)
