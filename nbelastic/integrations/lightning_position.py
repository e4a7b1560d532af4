"""Where a Trainer is: what a commit records of it beside the model, its optimizers and its data."""

from __future__ import annotations

import copy
import csv
import os
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from torchmetrics import Metric

from nbelastic.integrations.lightning_callbacks import averaging
from nbelastic.integrations.lightning_logged import logged, restore_logged
from nbelastic.state.user_words import UserWords

USER_WORDS = UserWords(
    {
        "position": None,
        "position.accumulate_grad_batches": "accumulate_grad_batches",
        "position.callbacks.": "",
        "position.callbacks.ModelCheckpoint.dirpath": None,
        "position.places": "the folders of its logs and checkpoints",
    },
    save="run the job with checkpoint=FOLDER, and read the checkpoint with torch.distributed.checkpoint",
)

# Of a ModelCheckpoint, beside its own state. Ranks save together, so all must know whether a save is due.
SAVED = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")


class Position:
    """A value of the state: counters of the loops, states of callbacks, where loggers and checkpoints write."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.validates = False  # the last batch is done, and its validation is not

    def state_dict(self) -> dict[str, Any]:
        loops = self._trainer.fit_loop.state_dict()
        loops["state_dict"] = {}  # the position of the data: the sampler is a value of its own
        callbacks = {one.state_key: one.state_dict() for one in self._trainer.callbacks}
        return {
            "loops": loops,
            "callbacks": callbacks,
            "averaged": [one._latest_update_epoch for one in averaging(self._trainer)],  # their own states lack it
            "saved": [{name: vars(one).get(name) for name in SAVED} for one in self._checkpoints()],
            "places": self.places(),
            "validates": self.validates,
            "accumulate_grad_batches": self._trainer.accumulate_grad_batches,
            "stops": self._trainer.should_stop,
            "logged": logged(self._trainer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set_places(state["places"])
        for one in self._trainer.callbacks:
            if state["callbacks"].get(one.state_key):
                one.load_state_dict(copy.deepcopy(state["callbacks"][one.state_key]))
        for one, epoch in zip(averaging(self._trainer), state["averaged"], strict=True):
            one._latest_update_epoch = epoch
        for one, saved in zip(self._checkpoints(), state["saved"], strict=True):
            vars(one).update(saved)
        self._trainer.fit_loop.load_state_dict(copy.deepcopy(state["loops"]))
        self.validates, self._trainer.should_stop = state["validates"], state["stops"]
        self._trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
        restore_logged(self._trainer, state["logged"])

    def places(self) -> list[Any]:
        """Versions of loggers and folders of checkpoints: each process has chosen its own, as no world was there."""
        loggers = self._trainer.loggers  # that of `fast_dev_run` has any attribute that it is asked for
        versions = [logger.version if "_version" in vars(logger) else None for logger in loggers]
        return [versions, [one.dirpath for one in self._checkpoints()]]

    def set_places(self, places: list[Any]) -> None:
        for logger, version in zip(self._trainer.loggers, places[0], strict=True):
            if "_version" in vars(logger):
                logger._version = version
        for one, folder in zip(self._checkpoints(), places[1], strict=True):
            one.dirpath = folder

    def continue_files(self) -> None:
        """CSVLogger begins its file anew in each process: a new rank 0 keeps the lines of the old one."""
        steps = self._trainer.fit_loop.epoch_loop._batches_that_stepped + self.validates
        for logger in self._trainer.loggers:
            if isinstance(logger, CSVLogger) and logger._experiment is None:
                file = os.path.join(logger.log_dir, ExperimentWriter.NAME_METRICS_FILE)
                lines: list[dict[str, str]] = []
                if logger._fs.isfile(file):
                    with logger._fs.open(file, "r", newline="") as old:
                        lines = [line for line in csv.DictReader(old) if (line["step"] or "").isdigit()]
                        lines = [line for line in lines if int(line["step"]) < steps]
                logger.experiment.metrics = [{k: v for k, v in line.items() if v} for line in lines]
                logger.save()

    def _checkpoints(self) -> list[Any]:
        return [one for one in self._trainer.callbacks if isinstance(one, ModelCheckpoint)]


class Sums:
    """The metrics of this rank as of the last two commits: what it has summed up in this epoch. Each rank has its own.

    A sharded module may return to the commit before the last one of this rank.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._kept: dict[int, tuple[dict[int, Any], Any]] = {}  # by the number of the commit

    @property
    def are_own(self) -> bool:
        """Whether this process has made a commit that the training has not gone back behind."""
        return bool(self._kept)

    def keep(self, commit: int) -> None:
        connector = self._trainer._logger_connector
        kept = {id(one): (one._copy_state_dict(), one._update_count) for one in self._all()}
        self._kept = {number: one for number, one in self._kept.items() if number == commit - 1}
        self._kept[commit] = kept, (connector._first_loop_iter, connector._current_fx)

    def restore(self, commit: int) -> None:
        """Return to this commit, or to the last one before it that this process has made, if it has made any."""
        if not self._kept:
            return
        self._kept = {number: one for number, one in self._kept.items() if number <= commit}
        kept: dict[int, Any] = {}
        if self._kept:
            kept, at = self._kept[max(self._kept)]
            self._trainer._logger_connector._first_loop_iter, self._trainer._logger_connector._current_fx = at
        for one in self._all():
            if id(one) not in kept:
                one.reset()
                continue
            values, one._update_count = kept[id(one)]
            one.__dict__.update(copy.deepcopy(values))
            one._computed = None

    def _all(self) -> list[Metric]:
        logged = self._trainer.fit_loop.epoch_loop._results.values()
        module = self._trainer.lightning_module.modules()
        return [one for one in (*logged, *module) if isinstance(one, Metric)]
