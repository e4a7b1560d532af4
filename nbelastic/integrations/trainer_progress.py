"""How far a Hugging Face Trainer has come, beside its model and its optimizer: a value of the training state."""

from __future__ import annotations

import copy
import json
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerControl

from nbelastic.state.user_words import UserWords

# Of the Trainer's state. The rest is set anew in each world, but the history, which is kept as text.
KEPT = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
USER_WORDS = UserWords(  # arguments of the Trainer and of `train`
    {
        "optimizer.": "",
        "optimizer.lr": "learning_rate",
        "optimizer.initial_lr": "learning_rate",
        "progress.": None,
        "progress.learning_rates": "learning_rate",
        "progress.global_batch": "global_batch",
    },
    save="trainer.save_model(FOLDER) on all ranks writes the model, while it trains in a cell with %%elastic_px --at-commit",
)
FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class TrainerProgress:
    """`values`: as they were at the last `capture`, or as they were received; empty before the first step."""

    def __init__(self) -> None:
        self.global_batch = 0  # samples per step; 0 until the first world
        self.learning_rates: list[float] = []  # of the groups, as the program begins; a new program may change them
        self.values: dict[str, Any] = {}
        self._first: list[dict[str, Any]] = []  # the attributes of callbacks before the first step
        self._first_schedule: dict[str, Any] | None = None  # of a scheduler of the user's own, which is not made anew
        self._written = 0  # how many entries of the log history are in `values["history"]`

    @property
    def step(self) -> int:
        """How many steps are done."""
        return int(self.values["state"]["global_step"]) if self.values else 0

    def state_dict(self) -> dict[str, Any]:
        return {"global_batch": self.global_batch, "learning_rates": self.learning_rates, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.global_batch, self.values = state["global_batch"], state["values"]
        self.learning_rates = state["learning_rates"]
        self._written = len(self._history())

    def begin(self, trainer: Any) -> None:
        """The training has not begun: a world that returns to this has no `values`."""
        self._first = [copy.deepcopy(one.state()["attributes"]) for one in _with_state(trainer)]
        if trainer.lr_scheduler is not None:
            self._first_schedule = copy.deepcopy(trainer.lr_scheduler.state_dict())

    def capture(self, trainer: Any, epoch: int, epoch_start: int) -> None:
        """Take the values of `trainer` right after a step. `epoch_start`: the number of steps before this epoch."""
        state = trainer.state
        text = self.values.get("history", "") if self._written <= len(state.log_history) else ""
        new = state.log_history[self._written if text else 0 :]
        self._written = len(state.log_history)
        self.values = {
            "state": {name: getattr(state, name) for name in KEPT},
            "max_steps": state.max_steps,
            "history": text + "".join(json.dumps(entry, default=_plain) + "\n" for entry in new),  # an immutable text
            "callbacks": [one.state()["attributes"] for one in _with_state(trainer)],
            "control": {name: getattr(trainer.control, name) for name in FLAGS},
            "scheduler": trainer.lr_scheduler.state_dict(),
            "learning_rates": self.learning_rates,
            "loss": trainer._tr_loss.clone(),  # the sum since it was logged; to read its number would wait for the GPU
            "loss_logged": trainer._total_loss_scalar,
            "logged_at": trainer._globalstep_last_logged,
            "epoch": epoch,
            "epoch_start": epoch_start,
        }

    def restore_scheduler(self, scheduler: Any, groups: list[dict[str, Any]]) -> None:
        """Set the scheduler. If a new program has set other learning rates, its schedule goes on with them."""
        if not self.values:
            if self._first_schedule is not None:
                scheduler.load_state_dict(copy.deepcopy(self._first_schedule))
            return
        scheduler.load_state_dict(self.values["scheduler"])
        before = self.values["learning_rates"]
        if before == self.learning_rates or len(before) != len(self.learning_rates):
            return
        factors = [new / old if old else 1.0 for new, old in zip(self.learning_rates, before, strict=True)]
        for group, rate, factor in zip(groups, self.values["scheduler"]["_last_lr"], factors, strict=True):
            group["lr"] = rate * factor
        for one in (scheduler, *getattr(scheduler, "_schedulers", ())):
            if hasattr(one, "base_lrs"):
                one.base_lrs = [rate * factor for rate, factor in zip(one.base_lrs, factors, strict=True)]

    def restore_state(self, trainer: Any) -> None:
        """Set the Trainer's state: it has just made a new one."""
        if self.values:
            for name, value in self.values["state"].items():
                setattr(trainer.state, name, value)
            trainer.state.log_history = self._history()
        callbacks = self.values["callbacks"] if self.values else copy.deepcopy(self._first)
        for one, attributes in zip(_with_state(trainer), callbacks, strict=True):
            for name, value in attributes.items():
                setattr(one, name, value)

    def restore_counts(self, trainer: Any, control: TrainerControl) -> None:
        """Set what the Trainer has just set to its beginning: the losses, and what the last step has asked for."""
        trainer._initial_global_step = 0
        if self.values:
            trainer._tr_loss = self.values["loss"].to(trainer.args.device, copy=True)
            trainer._total_loss_scalar = self.values["loss_logged"]
            trainer._globalstep_last_logged = self.values["logged_at"]
            for name, flag in self.values["control"].items():
                setattr(control, name, flag)
            if trainer.state.max_steps != self.values["max_steps"]:  # a checkpoint of a job that was to end earlier
                control.should_training_stop = False

    def _history(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in self.values.get("history", "").splitlines()]


def _plain(value: Any) -> Any:
    """What a log entry has beside numbers and text: an array, such as a confusion matrix, becomes lists."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _with_state(trainer: Any) -> list[Any]:
    """The callbacks that say what their state is."""
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
