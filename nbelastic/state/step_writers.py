"""What a `StepLog` writes to: TensorBoard, MLflow, Weights & Biases. Each is imported only on the rank that writes."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any, Protocol

from nbelastic.errors import UsageError

PAGE = 1000  # metrics that an MLflow server takes at once


class StepWriter(Protocol):
    """What rank 0 writes to. A step that an earlier writer has written already is to be replaced, or left as it is."""

    def write(self, step: int, values: dict[str, float]) -> None: ...

    def flush(self) -> None:
        """Return when all that was written is safe from a kill of this process."""

    def close(self) -> None: ...


def _load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{package} is not installed on this host ({error}): pip install {package}.") from None


class TensorBoard:
    """A SummaryWriter. TensorBoard hides what earlier files of the folder have from `first_step` on."""

    def __init__(self, folder: Path, first_step: int, options: dict[str, Any]) -> None:
        writer = _load("torch.utils.tensorboard", "tensorboard").SummaryWriter
        while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(0.02)  # files are read in the order of their names, which begin with the second
        self._writer = writer(str(folder), purge_step=first_step, **options)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run of MLflow, found by its tag `nbelastic.log`. Steps that it has already are left as they are."""

    def __init__(self, key: str, experiment: str, run_name: str | None, tracking_uri: str | None) -> None:
        mlflow = _load("mlflow", "mlflow-skinny")
        self._metric = mlflow.entities.Metric
        self._client = client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        found = client.get_experiment_by_name(experiment)
        number = found.experiment_id if found is not None else client.create_experiment(experiment)
        runs = client.search_runs([number], f"tags.`nbelastic.log` = '{key}'")
        run = runs[0] if runs else client.create_run(number, tags={"nbelastic.log": key}, run_name=run_name)
        self._run = run.info.run_id
        self._last: dict[str, int] = {}  # the last step that the run has, by name
        self._new: list[Any] = []

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if name not in self._last:
                history = self._client.get_metric_history(self._run, name)
                self._last[name] = max((metric.step for metric in history), default=-1)
            if step > self._last[name]:
                self._new.append(self._metric(name, value, int(time.time() * 1000), step))
                self._last[name] = step
        if len(self._new) >= PAGE:
            self.flush()

    def flush(self) -> None:
        new, self._new = self._new, []
        for start in range(0, len(new), PAGE):
            self._client.log_batch(self._run, metrics=new[start : start + PAGE])

    def close(self) -> None:
        self.flush()
        self._client.set_terminated(self._run)


class WandB:
    """A run of Weights & Biases, which is resumed by its id. The run ignores steps before its last one."""

    def __init__(self, key: str, options: dict[str, Any]) -> None:
        self._run = _load("wandb", "wandb").init(**{"id": key, "resume": "allow"} | options)

    def write(self, step: int, values: dict[str, float]) -> None:
        if step >= self._run.step:  # else it prints a warning for each
            self._run.log(values, step=step)

    def flush(self) -> None:
        """W&B's own process has the values already; it lives on when this one is killed."""

    def close(self) -> None:
        self._run.finish()
