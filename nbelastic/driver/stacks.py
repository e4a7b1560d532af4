"""Where every worker is right now: asked of all of them, answered by the threads of their links."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from msgspec import Struct

from nbelastic.core import wire
from nbelastic.core.world import WorkerState

if TYPE_CHECKING:
    from nbelastic.driver.driver import Driver


class WorkerStack(Struct, frozen=True):
    """`place` is its innermost frame in the user's code, as `train.py:88 in load`; `text` the Python stack of its main
    thread, innermost call last, empty if it did not answer; `note` says if it is behind the others.
    """

    worker: str
    rank: int | None
    place: str
    text: str
    note: str = ""


def show_stacks(driver: Driver, timeout: float, found: Future[list[WorkerStack]]) -> None:
    """In the driver's thread: ask all; resolve `found` when all have answered, or after `timeout` seconds."""
    live = driver.fleet.live
    live.asked += 1
    number = live.asked
    asked = [w for w, worker in driver.world.workers.items() if worker.state is not WorkerState.STARTING]
    late = False

    def settle(_: Driver) -> list[WorkerStack] | None:
        answered = {w: said for w, said in live.stacks.items() if said.number >= number}
        if not late and any(w not in answered for w in asked if w in driver.world.workers):
            return None
        rows = {worker.id: worker for worker in driver.status.workers}
        found = []
        for w in (w for w in asked if str(w) in rows):
            row, said = rows[str(w)], answered.get(w, wire.StackShown(w, number, "", ""))
            commits = f"{row.behind} commit{'s' if row.behind > 1 else ''} behind"
            note = (row.reason or commits) if row.behind else ""
            found.append(WorkerStack(row.id, row.rank, said.place, said.text, note))
        return sorted(found, key=lambda stack: (stack.rank is None, stack.rank, stack.worker))

    def give_up() -> None:
        nonlocal late
        late = True
        driver.look()

    driver.fleet.to_workers(asked, wire.ShowStack(number))
    driver.watch(settle, found)
    driver.later(timeout, give_up)
