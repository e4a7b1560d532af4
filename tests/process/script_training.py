"""Scripts that train on a cluster, torchruns of terminals, and the reports of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.process.training import by_rank, lines_in
from tests.support.waiting import until
from tests.support.warm_agents import WarmPopen

SCRIPTS = Path(__file__).parent / "scripts"
REPORT, TRAIN = SCRIPTS / "report.py", SCRIPTS / "train.py"
MANY_STEPS = 10**9


def reports_by_rank(folder: Path, restarts: int = 0) -> list[dict[str, Any]]:
    """The reports of all ranks, by rank."""
    files = sorted(folder.glob(f"*-{restarts}.json"), key=lambda path: int(path.name.partition("-")[0]))
    return [json.loads(path.read_text()) for path in files]


class ScriptTraining:
    """`train.py` on a cluster; it trains until `finish` is called."""

    def __init__(self, cluster: nbe.Cluster, folder: Path, steps: int = MANY_STEPS, **options: Any) -> None:
        self.cluster, self.folder = cluster, folder
        folder.mkdir(exist_ok=True)
        self.job = cluster.run_script(TRAIN, folder, steps, **options)

    def lines(self) -> list[dict[str, Any]]:
        return lines_in(self.folder)

    def wait_for_world(self, world: int, timeout: float = 100.0) -> list[Any]:
        """Wait until `world` workers train together; return them by rank.

        Each imports torch anew at each change, which took 20 s on two cores at a load of 15.
        """

        def stepped() -> bool:
            status = self.cluster.status()
            pids = {w.pid for w in status.workers}
            now = {line["pid"] for line in self.lines() if line["world"] == world}
            return self.job.done() or (status.world_size == world and 0 not in pids and now >= pids)

        until(stepped, timeout, lambda: f"a step of {world} ranks; {self.cluster.status()}")
        assert not self.job.done(), self.job.exception()
        return by_rank(self.cluster)

    def finish(self, timeout: float = 100.0) -> list[dict[str, Any]]:
        """End the training, check that no step is missing, and return the logged lines."""
        (self.folder / "finish").touch()
        self.job.result(timeout=timeout)
        lines = self.lines()
        made = sorted({line["step"] for line in lines})
        assert made == list(range(1, len(made) + 1)), "a step is missing"
        return lines


@contextmanager
def torchrun(*arguments: Any, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run torchrun as in a terminal, and end it after the block. Its output is in `.stdout`."""
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]
    with WarmPopen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def join_options(cluster_file: Path | str, *more: Any, workers: int = 1) -> tuple[Any, ...]:
    """The options with which a torchrun joins a cluster as an external node."""
    return (
        *("--rdzv-backend=nbelastic", f"--rdzv-endpoint={cluster_file}"),
        *("--nnodes=1:4", f"--nproc-per-node={workers}", *more),
    )
