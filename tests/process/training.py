"""A training on a cluster, and what its processes have logged."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.support.waiting import until


def by_rank(cluster: nbe.Cluster) -> list[Any]:
    return sorted((w for w in cluster.workers if w.rank is not None), key=lambda w: w.rank)


def lines_in(folder: str | Path) -> list[dict[str, Any]]:
    """The lines that the processes of a training have logged, by time."""
    found = []
    for file in Path(folder).glob("*.jsonl"):
        for text in file.read_text().splitlines():
            try:
                found.append(json.loads(text))
            except ValueError:  # the last line of a killed process
                continue
    return sorted(found, key=lambda line: line["t"])


class Training:
    """A job that trains until `finish` is called, and the lines that its processes have logged."""

    def __init__(
        self, cluster: nbe.Cluster, folder: Path, program: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        self.cluster, self.folder, self._earlier = cluster, folder, len(cluster.events)
        folder.mkdir(exist_ok=True)
        self.job = cluster.run(program, str(folder), *args, **kwargs)

    def lines(self, key: str = "step") -> list[dict[str, Any]]:
        return [line for line in lines_in(self.folder) if key in line]

    def events(self, kind: str) -> list[Any]:
        """The events of this kind since the job was started."""
        return [event for event in self.cluster.events[self._earlier :] if event.kind == kind]

    def wait_for_world(self, world: int, timeout: float = 30.0) -> list[Any]:
        """Wait until `world` workers train together and each has made a step in that world; return them by rank."""
        self.cluster.wait(world, timeout=timeout)

        def stepped() -> bool:
            status = self.cluster.status()
            now = {line["pid"] for line in self.lines() if line["generation"] == status.generation}
            return status.world_size == world and now >= {w.pid for w in status.workers if w.rank is not None}

        until(
            lambda: self.job.done() or stepped(), timeout, lambda: f"a step of {world} ranks; {self.cluster.status()}"
        )
        assert not self.job.done(), self.job.exception()
        return by_rank(self.cluster)

    def signal_worker(self, worker: Any, sig: signal.Signals = signal.SIGKILL) -> None:
        os.kill(worker.pid, sig)
        until(lambda: all(w.id != worker.id for w in self.cluster.workers), what=f"{worker.id} to be lost")

    def finish(self, timeout: float = 30.0) -> list[Any]:
        """End the training, check that no step was lost, and return the results by rank."""
        (self.folder / "finish").touch()
        results = self.job.result(timeout=timeout)
        self.check(results)
        return results

    def check(self, results: list[Any]) -> None:
        """Check that every step was made, none twice by one process, with the same numbers on all ranks."""
        lines = self.lines()
        by_pid: dict[int, list[int]] = {}
        sums: dict[tuple[int, int], set[str]] = {}
        for line in lines:
            by_pid.setdefault(line["pid"], []).append(line["step"])
            sums.setdefault((line["step"], line["generation"]), set()).add(line["sum"])
        for pid, steps in by_pid.items():
            assert all(a < b for a, b in itertools.pairwise(steps)), f"process {pid} repeated a step"
        made = sorted({line["step"] for line in lines})
        assert made == list(range(1, len(made) + 1)), "a step is missing"
        assert {where: found for where, found in sums.items() if len(found) > 1} == {}
        assert not self.events("replica-differs") + self.events("replicas-differ"), "the ranks have differed"
        if results and isinstance(results[0], dict):
            assert len({result["sum"] for result in results}) == 1
            assert {result["step"] for result in results} == {made[-1]}


@contextmanager
def in_one_generation(training: Training) -> Iterator[None]:
    """Check that the generation of a training is the same before and after this block."""
    before = training.cluster.status().generation
    yield
    assert training.cluster.status().generation == before
