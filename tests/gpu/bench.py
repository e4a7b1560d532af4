"""What a part gets: where it runs, how long it may run, and where it writes its results."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.gpu.results import Results
from tests.process.training import Training

# Several ranks of NCCL may share one GPU (NCCL 2.30): one channel each, over sockets, so that no rank waits for room.
SHARING = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}


@dataclass(frozen=True)
class Bench:
    """`kind`: cuda; cpu, with small sizes; or double: the CPU, with a double of NCCL. `end`: on the monotonic clock."""

    kind: str
    quick: bool
    gpus: int
    folder: Path
    end: float
    results: Results
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def has_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def left(self) -> float:
        """Seconds until this part is killed."""
        return self.end - time.monotonic()

    def choose(self, on_gpu: Any, on_cpu: Any, quick: Any = None) -> Any:
        """A size or a number that fits the machine."""
        if self.quick:
            return on_cpu if quick is None else quick
        return on_gpu if self.has_gpu else on_cpu

    def new_folder(self, name: str) -> Path:
        folder = self.folder / f"{name}-{next(self._numbers)}"
        folder.mkdir(parents=True)
        return folder

    def cluster(self, hosts: str, **options: Any) -> nbe.Cluster:
        """A cluster without back-off, whose logs lie beside the results."""
        logs = self.new_folder("logs")
        return nbe.Cluster(hosts, **{"cooldown": (0, 0), "stop_timeout": 5, "log_dir": logs, **options})

    def alone(self) -> dict[str, Any]:
        """The options of a cluster of one worker: on a GPU it uses NCCL."""
        return {"backend": "auto" if self.has_gpu else "gloo"}

    def world(self, most: int = 4) -> int:
        """Ranks for the parts of NCCL: one per GPU; three that share one, or on the CPU."""
        return min(self.gpus, most) if self.gpus > 1 else 3

    def nccl(self, env: dict[str, str] | None = None, preload: tuple[str, ...] = ()) -> dict[str, Any]:
        """The options of a cluster whose ranks use NCCL: each its own GPU, all the same one, or the double. `--cpu`: gloo."""
        if self.kind == "cpu":
            return {"backend": "gloo", "env": env or {}}
        if self.kind == "double":
            from tests.support.nccl_double import CLUSTERS

            own = CLUSTERS["nccl"]
            return {**own, "preload": (*own["preload"], *preload), "env": {**own["env"], **(env or {})}}
        return {"backend": "nccl", "preload": preload, "env": {**(SHARING if self.gpus == 1 else {}), **(env or {})}}

    @contextmanager
    def training(
        self, hosts: str, world: int, program: Any, options: dict[str, Any], **kwargs: Any
    ) -> Iterator[Training]:
        """Train on a new cluster until the end of this block. `kwargs`: see `training_on`."""
        with self.cluster(hosts, **options) as cluster, self.training_on(cluster, world, program, **kwargs) as training:
            yield training

    @contextmanager
    def training_on(
        self, cluster: nbe.Cluster, world: int, program: Any, *, folder: Path | None = None, **kwargs: Any
    ) -> Iterator[Training]:
        """Train with `program(folder, **kwargs)` until the end of this block."""
        training = Training(cluster, folder or self.new_folder("steps"), program, **kwargs)
        training.wait_for_world(world, timeout=90)
        yield training
        if not training.job.done():
            training.job.stop()
            training.job.wait(timeout=20)
