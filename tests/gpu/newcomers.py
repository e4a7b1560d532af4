"""Newcomers that die while their world forms, or while they receive the state: the others train on with the right numbers."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

from tests.gpu import programs
from tests.gpu.bench import Bench
from tests.gpu.faults import TIMEOUT, Death, by_signal, finish, lose
from tests.process.training import Training
from tests.support.waiting import until

DYING = "tests.gpu.dying_connect"  # has a newcomer die while NCCL connects


def run(bench: Bench) -> None:
    """A rank is killed; its successor dies, too; the next one trains."""
    world, steps = bench.world(), bench.new_folder("steps")
    options = {"min": 1, "max": world, **bench.nccl(env={"NBELASTIC_TEST_FOLDER": str(steps)}, preload=(DYING,))}
    places = ("sync",) if bench.kind == "cpu" else ("sync", "init")
    sizes = {"ballast": bench.choose(512, 32)}
    with bench.training(
        f"localhost:{world}", world, programs.train, options, folder=steps, pause=0.01, **sizes
    ) as training:
        for place in places:
            with bench.results.case(f"a newcomer dies in {place}") as case:
                for _ in range(bench.choose(3, 2, 1)):
                    lose(training, case, world, newcomer(training, place))
        finish(bench, training)


def newcomer(training: Training, place: str) -> Callable[[], Death]:
    """The end of a rank, and of its first successor in this place."""

    def death() -> Death:
        dead = training.folder / f"dead-{place}"
        dead.unlink(missing_ok=True)
        (training.folder / f"die-{place}").touch()
        first = by_signal(training, signal.SIGKILL)().pids
        until(lambda: dead.exists() or training.job.done(), TIMEOUT, f"a death in {place}")
        assert dead.exists(), training.job.exception()
        fact = json.loads(dead.read_text())
        return Death(fact["t"], fact["generation"], (*first, fact["pid"]))

    return death
