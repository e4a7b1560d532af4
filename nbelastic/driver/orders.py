"""Orders from the dashboard, and cells that run on all workers between jobs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nbelastic.core.errors import UsageError
from nbelastic.core.world import WorkerState
from nbelastic.driver.fleet import error_of

if TYPE_CHECKING:
    from nbelastic.driver.cluster import Cluster
    from nbelastic.driver.driver import Driver


def take(cluster: Cluster, message: Mapping[str, Any], by: str) -> None:
    """Do what a button's message says. UsageError for what is none, or cannot be."""
    match dict(message):
        case {"order": "add_host", "host": str(host)}:
            cluster.add_host(host, by=by)
        case {"order": "remove_host", "host": str(host), **rest}:
            cluster.remove_host(host, now=rest.get("now") is True, by=by)
        case {"order": "scale", **rest}:
            low, high = rest.get("min"), rest.get("max")
            if not all(bound is None or type(bound) is int for bound in (low, high)):
                raise UsageError("min and max must be whole numbers.")
            cluster.scale(low, high, by=by)
        case {"order": "stop_job"}:
            cluster.stop_job(by=by)
        case {"order": "stop"}:
            cluster.request_stop(by=by)
        case _:
            raise UsageError("this is no order.")


def execute_on_all(
    driver: Driver, source: str, setup: bool, results: Future[list[tuple[str, str, str, str | None]]]
) -> None:
    """In the driver's thread: run a cell on every ready worker; resolve `results` when all have answered or gone."""
    fleet = driver.fleet
    if setup:
        fleet.setup_cells.append(source)
    waiting = {w for w, worker in driver.world.workers.items() if worker.state is WorkerState.READY}
    answers: dict[str, tuple[str, str, str, str | None]] = {}

    def settle(_: Driver) -> list[tuple[str, str, str, str | None]] | None:
        gone = [w for w in waiting if w not in driver.world.workers and str(w) not in answers]
        for w in gone:
            answers[str(w)] = (str(w), "", "", "the worker died while the cell ran")
        return [answers[str(w)] for w in sorted(waiting)] if len(answers) == len(waiting) else None

    for w in waiting:

        def done(result: Any, name: str = str(w)) -> None:
            error = error_of(result)
            answers[name] = (name, str(result.stdout), str(result.stderr), error or None)
            driver.look()

        fleet.execute(w, source, done)
    driver.watch(settle, results)
