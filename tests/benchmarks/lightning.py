"""Lightning's Trainer and Fabric on three workers: `python -m tests.benchmarks.lightning [--json FILE] [--quick]`.

`trainer`, `fabric`: SIGKILL of a rank to the next step, and to the first step at full size. `closures`: the seconds of a step
of a Trainer with 25 M parameters, where the closure runs before `optimizer.step` and where it runs inside.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.benchmarks import programs, recovery

WORKERS = 3
BATCH = 32 * WORKERS
LARGE_STEPS = 12


class Log:
    """Of one process: a line per step."""

    def __init__(self, folder: str) -> None:
        self._file = (Path(folder) / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def __call__(self, step: int) -> None:
        line = {"t": time.time(), "step": step, "rank": nbe.rank(), "world": nbe.size(), "pid": os.getpid()}
        self._file.write(json.dumps(line) + "\n")


def module(model: Any, optimizer: Any, after: Any) -> Any:
    """A LightningModule that trains `model` to return its input, and calls `after(global_step)` after each batch."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Any:
            return (self.model(batch[0]) - batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return optimizer

        def on_train_batch_end(self, *_: Any) -> None:
            after(self.trainer.global_step)

    return Module()


def trainer(**limits: Any) -> Any:
    import lightning

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(accelerator="cpu", **quiet, **limits)


def record_trainer(folder: str, steps: int) -> int:
    """The training of `programs.record_steps`, with a Trainer."""
    import torch

    from nbelastic.integrations.lightning import fit

    log = Log(folder)

    def after(step: int) -> None:
        log(step)
        time.sleep(programs.SLEEP)

    data = torch.utils.data.TensorDataset(torch.randn(1000 * BATCH, programs.SIZE[0]))
    one = trainer(max_epochs=-1, max_steps=steps)
    fit(one, module(*programs.model_and_optimizer(), after), torch.utils.data.DataLoader(data, BATCH))
    return int(one.global_step)


def record_fabric(folder: str, steps: int) -> int:
    """The same with Fabric."""
    import torch

    from nbelastic.integrations.lightning import Fabric

    log = Log(folder)
    model, optimizer = programs.model_and_optimizer()
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)

    @nbe.elastic
    def train(state: Any) -> int:
        fabric = Fabric(accelerator="cpu")
        wrapped, stepped = fabric.setup(state.model, state.optimizer)
        while state.step < steps:
            x = torch.randn(32, programs.SIZE[0])
            stepped.zero_grad()
            fabric.backward((wrapped(x) - x).pow(2).mean())
            stepped.step()
            state.step += 1
            log(state.step)
            state.commit()
            time.sleep(programs.SLEEP)
        return int(state.step)

    return int(train(state))


def time_large_steps(_: str, *, first: bool) -> list[float]:
    """The seconds of each step of a Trainer with 25 M parameters. `first`: closures run before the optimizer's step."""
    import torch

    from nbelastic.integrations import lightning

    if not first:
        lightning._run_closure_first = lambda optimizer: None
    times = [time.time()]
    data = torch.utils.data.TensorDataset(torch.randn(100 * BATCH, programs.LARGE))
    one = trainer(max_epochs=-1, max_steps=LARGE_STEPS)
    large = module(*programs.large_model_and_optimizer(), lambda step: times.append(time.time()))
    lightning.fit(one, large, torch.utils.data.DataLoader(data, 8 * WORKERS))
    return [b - a for a, b in itertools.pairwise(times[2:])]


def closures(rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"before": [], "inside": []}
    for _ in range(rounds):
        for name, first in (("before", True), ("inside", False)):
            with nbe.Cluster(f"localhost:{WORKERS}", min=WORKERS, preload=["lightning"]) as cluster:
                found[name] += cluster.run(time_large_steps, "", first=first).result(timeout=300)[0]
    return found


def cases(part: int) -> recovery.Cases:
    def kills(program: Any) -> dict[str, list[float]]:
        count = max(5, 20 // part)
        return recovery.faults(signal.SIGKILL, count, 0.7, program, size=WORKERS, preload=["lightning"])

    return {
        "trainer": lambda: kills(record_trainer),
        "fabric": lambda: kills(record_fabric),
        "plain": lambda: kills(programs.record_steps),
        "closures": lambda: closures(max(1, 2 // part)),
    }


if __name__ == "__main__":
    recovery.run(__doc__, 10, cases)
