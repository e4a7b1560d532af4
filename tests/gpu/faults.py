"""Ranks that are lost in each place of a training, and stopped; hosts that join and leave. Nothing may be lost by it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.gpu import programs
from tests.gpu.bench import Bench
from tests.gpu.results import Case
from tests.process.training import Training, by_rank
from tests.support.waiting import until

PLACES = ("all-reduce", "backward", "step", "ddp")
AT_THE_TOP = ("ddp", "split", "rebuild")  # or near the top of the function, which each generation calls
TIMEOUT = 40.0  # seconds in which a world is whole again
LATE = 2.0  # seconds to the next step; after them the result says where the workers are
MAX_STACK = 300  # last characters of each stack


class Death(NamedTuple):
    """When a rank died, in which generation, and the processes that died."""

    at: float
    generation: int
    pids: tuple[int, ...]


def with_gloo(bench: Bench) -> None:
    """Three workers that share what there is; tensors are on the GPU if there is one."""
    with bench.cluster("localhost:3", min=1, max=4, backend="gloo") as cluster:
        with bench.training_on(cluster, 3, programs.train, pause=0.01, large=1) as training:
            lose_in_each_place(bench, training, PLACES, 3)
            with bench.results.case("a host joins") as case:
                begun = time.monotonic()
                cluster.add_host("127.0.0.2:1")
                training.wait_for_world(4, TIMEOUT)
                case.record("s", time.monotonic() - begun)
            with bench.results.case("a host is removed") as case:
                begun = time.monotonic()
                cluster.remove_host("127.0.0.2")
                training.wait_for_world(3, TIMEOUT)
                case.record("s", time.monotonic() - begun)
            finish(bench, training)
        with bench.training_on(cluster, 3, programs.train, pause=0.01, every=3) as training:
            with bench.results.case("three steps per commit: killed in backward") as case:
                for _ in range(bench.choose(3, 2, 1)):
                    lose(training, case, 3, at_place(training, "backward"))
            finish(bench, training)


def with_nccl(bench: Bench) -> None:
    """As many ranks as GPUs or, on one that they share, three. Their state is so large that its transfer takes a while."""
    world = bench.world(most=8)
    options = {"min": 1, "max": world, **bench.nccl()}
    sizes = {"large": bench.choose(64, 1), "ballast": bench.choose(256, 8)}
    with bench.training(
        f"localhost:{world}", world, programs.train, options, groups=True, pause=0.01, **sizes
    ) as training:
        lose_in_each_place(bench, training, (*PLACES, "rebuild", "split"), world)
        finish(bench, training)


def lose_in_each_place(bench: Bench, training: Training, places: tuple[str, ...], world: int) -> None:
    """Kill ranks at random, stop one, and let one die in each place. The numbers are seconds to the next step."""
    times = bench.choose(3, 2, 1)
    with bench.results.case("killed at random") as case:
        for _ in range(times):
            time.sleep(random.uniform(0.2, 0.5))
            lose(training, case, world, by_signal(training, signal.SIGKILL))
    with bench.results.case("killed soon after a newcomer's first step") as case:
        for _ in range(times):
            training.wait_for_world(world, TIMEOUT)
            time.sleep(random.uniform(0.0, 0.3))
            lose(training, case, world, by_signal(training, signal.SIGKILL))
    with bench.results.case("stopped") as case:
        lose(training, case, world, by_signal(training, signal.SIGSTOP))
    for place in places:
        with bench.results.case(f"killed in {place}") as case:
            for _ in range(times if place == "all-reduce" else min(times, 2)):
                lose(training, case, world, at_place(training, place))


def lose(training: Training, case: Case, world: int, death: Callable[[], Death]) -> None:
    """Lose a rank, and record the seconds to the survivors' next step. They keep their processes."""
    before = {worker.pid for worker in training.wait_for_world(world, TIMEOUT)}
    lost = death()

    def next_step() -> dict[str, Any] | None:
        lines = (line for line in training.lines() if line["generation"] > lost.generation)
        return next((line for line in lines if line["t"] > lost.at), None)

    def is_late() -> bool:
        return time.time() - lost.at > LATE

    until(lambda: training.job.done() or next_step() or is_late(), TIMEOUT)
    if is_late():
        case.note(**{f"late: {one.worker}": one.text.strip()[-MAX_STACK:] for one in training.cluster.stacks()})
    step = until(lambda: training.job.done() or next_step(), TIMEOUT, lambda: training.cluster.status().reason)
    assert not training.job.done(), training.job.exception()
    case.record("s", step["t"] - lost.at)
    after = {worker.pid for worker in training.wait_for_world(world, TIMEOUT)}
    others = before - set(lost.pids)
    assert others <= after, f"survivors {others - after} lost their processes"


def by_signal(training: Training, sig: signal.Signals) -> Callable[[], Death]:
    """The end of a random rank, whatever it does at that moment."""

    def death() -> Death:
        victim, generation = random.choice(by_rank(training.cluster)), training.cluster.status().generation
        at = time.time()
        os.kill(victim.pid, sig)
        return Death(at, generation, (victim.pid,))

    return death


def at_place(training: Training, place: str) -> Callable[[], Death]:
    """The end of the rank that comes first to this place. A training that is under way comes to some only after a loss."""

    def death() -> Death:
        dead = training.folder / f"dead-{place}"
        dead.unlink(missing_ok=True)
        (training.folder / f"die-{place}").touch()
        first = by_signal(training, signal.SIGKILL)().pids if place in AT_THE_TOP else ()
        until(lambda: dead.exists() or training.job.done(), TIMEOUT, f"a death in {place}")
        assert dead.exists(), training.job.exception()
        fact = json.loads(dead.read_text())
        return Death(fact["t"], fact["generation"], (*first, fact["pid"]))

    return death


def finish(bench: Bench, training: Training) -> None:
    """No step is lost or made twice, and all ranks have the same bits after each; also those of a large transfer."""
    with bench.results.case("no step lost, equal on all ranks") as case:
        results = training.finish(TIMEOUT)
        received = {tuple(line["ballast"]) for line in training.lines("ballast")}
        assert len(received) <= 1, f"transfers left other values: {received}"
        case.note(steps=results[0]["step"], device=results[0]["device"], workers=len(results))
