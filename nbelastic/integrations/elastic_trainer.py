"""A Hugging Face Trainer whose training goes on from the last commit, in any world.

In each generation `Trainer.train` is called again. `ElasticTrainer` overrides the steps of it that depend on the world: its
batches, where it resumes, the weight of each loss, and its log, which must not be a collective before the commit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from nbelastic.errors import UsageError
from nbelastic.integrations.global_batches import GlobalBatches
from nbelastic.integrations.loader_options import seed_of
from nbelastic.integrations.trainer_progress import TrainerProgress
from nbelastic.integrations.trainer_sharding import Sharding
from nbelastic.sharded.state import ShardedState
from nbelastic.state.state import TorchState

RESUMED = "the last commit"  # the Trainer takes any text for the checkpoint that it resumes from


def data_of(trainer: Any) -> tuple[Any, Any]:
    """The data set and its collator, as the Trainer uses them: without columns that the model does not take."""
    dataset, collate = trainer.train_dataset, trainer.data_collator
    if hasattr(dataset, "column_names"):  # of the library `datasets`
        return trainer._remove_unused_columns(dataset, description="Training"), collate
    return dataset, trainer._get_collator_with_removed_columns(collate, description="Training")


class Run:
    """What an elastic Trainer knows beside its own attributes."""

    def __init__(
        self, state: TorchState | ShardedState, progress: TrainerProgress, sharding: Sharding | None = None
    ) -> None:
        self.state = state
        self.progress = progress
        self.sharding = sharding
        self.batches: GlobalBatches  # of this generation
        self.first_epoch = -1  # of this generation
        self.epoch = self.epoch_start = 0
        self.samples = 0  # of all ranks in the present step
        self.sizes: list[int] = []  # of this rank's parts in the present step that are not used yet
        self.uncounted: list[int] = []  # `sizes`, until the Trainer has counted their labels
        self.weight: float | None = None  # of the present part; None outside a training step
        self.is_weighed = False  # `compute_loss` has been called for the present part
        self.loss_before = torch.zeros(())  # the sum of losses before the present step

    def commit(self) -> None:
        self.state.commit()
        if self.sharding is not None:
            self.sharding.committed()

    def begin_step(self, trainer: Any) -> None:
        """The Trainer is about to fetch the parts of its next step."""
        step = trainer.state.global_step - self.epoch_start
        self.samples = self.batches.samples(step)
        self.sizes = self.batches.sizes(step)
        self.uncounted = [*self.sizes]
        self.loss_before = trainer._tr_loss.clone()


class Steps(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """The last callback of the Trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Continue where the last commit was."""
        self._trainer._elastic.progress.restore_counts(self._trainer, control)

    def on_pre_optimizer_step(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Add the mean of all ranks' losses: if only one rank added its own, it would be lost with that rank.

        It is before the step, as a collective between a step and its commit makes every commit copy.
        """
        trainer, size = self._trainer, args.world_size
        if size > 1:
            added = trainer._tr_loss - trainer._elastic.loss_before
            dist.all_reduce(added)
            trainer._tr_loss.copy_(trainer._elastic.loss_before + added / size)
        state.total_flos += trainer.current_flos * size  # as if the other ranks had as many
        trainer.current_flos = 0


class ElasticTrainer:
    """Comes before the class of a Trainer in the bases of a class that is made for it."""

    _elastic: Run

    def get_train_dataloader(self: Any) -> Any:
        """The parts of this rank of each global batch. Accelerate does not prepare this loader: it would shard it again."""
        args = self.args
        dataset, collate = data_of(self)
        return DataLoader(
            dataset,
            batch_sampler=self._elastic.batches,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
            generator=torch.Generator().manual_seed(seed_of(args.seed, self._elastic.progress.step)),
        )

    def _init_training_state(self: Any, *args: Any) -> tuple[int, int]:
        super()._init_training_state(*args)  # type: ignore[misc]
        progress = self._elastic.progress
        progress.restore_state(self)
        self._elastic.sizes, self._elastic.uncounted = [], []  # an abort may have left some
        self._elastic.first_epoch = progress.values.get("epoch", 0)
        self._elastic.epoch_start = progress.values.get("epoch_start", 0)
        return self._elastic.first_epoch, 0

    def _prepare_for_training(self: Any, *args: Any) -> tuple[Any, Any]:
        prepared = super()._prepare_for_training(*args)  # type: ignore[misc]
        if self._elastic.sharding is not None:
            self._elastic.sharding.prepared()
        return prepared  # type: ignore[no-any-return]

    def create_scheduler(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A new scheduler sets the optimizer's options to those of its first step."""
        groups = self.optimizer.param_groups
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        scheduler = super().create_scheduler(*args, **kwargs)  # type: ignore[misc]
        if self._elastic.progress.values:
            for group, values in zip(groups, options, strict=True):
                group.update(values)
        self._elastic.progress.restore_scheduler(self.lr_scheduler, groups)
        return scheduler

    def _run_epoch(self: Any, **about: Any) -> None:
        """Run this epoch, the first one of a generation from where it was left."""
        run, batches = self._elastic, self._elastic.batches
        run.epoch = batches.epoch = about["epoch"]
        if run.epoch == run.first_epoch and run.progress.values:
            ended = self.control.should_training_stop or run.progress.values["control"]["should_epoch_stop"]
            used = (self.state.global_step - run.epoch_start) * batches.parts
            batches.skipped = len(batches) if ended else min(used, len(batches))
            about["epochs_trained"], about["resume_from_checkpoint"] = run.epoch, RESUMED
            about["steps_trained_in_current_epoch"] = batches.skipped
            asked = ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")
            self._evaluate_and_save(None, *(about[name] for name in asked))
        else:
            run.epoch_start, batches.skipped = self.state.global_step, 0
        super()._run_epoch(**about)  # type: ignore[misc]

    def _load_rng_state(self: Any, checkpoint: Any) -> None:
        """The training state has the generators."""

    def store_flos(self: Any) -> None:
        """`Steps` has counted them: a sum over the ranks would be a collective before the commit."""

    def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._elastic.begin_step(self)
        return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]

    def _get_num_items_in_batch(self: Any, batch_samples: list[Any], device: Any) -> Any:
        """The labels of a repeated sample do not count. A part that repeats one stays: its rank counts with the others."""
        sizes = self._elastic.uncounted or [1] * len(batch_samples)  # none in an evaluation
        self._elastic.uncounted = []
        counted = [part if size else _without_labels(part) for size, part in zip(sizes, batch_samples, strict=True)]
        return super()._get_num_items_in_batch(counted, device)  # type: ignore[misc]

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = self._elastic
        run.weight, run.is_weighed = run.sizes.pop(0) * self.args.world_size / run.samples, False
        try:
            loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        finally:
            run.weight = None
        if not run.is_weighed:
            raise UsageError(
                f"{type(self).__name__} has its own training_step(), which does not call self.compute_loss(): the loss is "
                "weighed there by the rank's share of the batch. Calculate it in compute_loss()."
            )
        return loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss, 0 for a repeated sample. A mean over this part is weighted: its gradient is to be that of the global batch."""
        self._elastic.is_weighed = True
        found = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        weight, has_count = self._elastic.weight, kwargs.get("num_items_in_batch") is not None
        if weight is None or (weight and has_count and self._scales_by_count(has_count)):
            return found
        if not self._scales_by_count(has_count):  # the Trainer will divide it by the number of parts
            weight *= self._elastic.batches.parts
        return (found[0] * weight, *found[1:]) if isinstance(found, tuple) else found * weight  # with the outputs

    def _scales_by_count(self: Any, has_count: bool) -> bool:
        """Whether the loss is a sum that is divided by the number of labels in the global batch, as the Trainer sees it."""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        return bool((self.model_accepts_loss_kwargs and has_count) or self.compute_loss_func is not None)

    def _maybe_log_save_evaluate(
        self: Any, tr_loss: Any, grad_norm: Any, *about: Any, learning_rate: Any = None
    ) -> None:
        """Called after each step, and at the end of an epoch: log, commit the step, then evaluate and save.

        The log is made here, as the Trainer's own begins with a collective: after a step each commit would have to copy.
        """
        run = self._elastic
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._log_losses(tr_loss, grad_norm, about[-1], learning_rate)
        if self.state.global_step > run.progress.step:
            run.progress.capture(self, run.epoch, run.epoch_start)
            run.commit()
        self._evaluate_and_save(grad_norm, *about)

    def _log_losses(self: Any, tr_loss: Any, grad_norm: Any, start_time: float, learning_rate: float | None) -> None:
        loss, steps = tr_loss.item(), self.state.global_step - self._globalstep_last_logged
        tr_loss.zero_()
        logs = {"loss": loss / steps}
        if grad_norm is not None:
            logs["grad_norm"] = float(grad_norm)
        logs["learning_rate"] = self._get_learning_rate() if learning_rate is None else learning_rate
        self._total_loss_scalar += loss
        self._globalstep_last_logged = self.state.global_step
        self._elastic.state.report(**logs, total=self.state.max_steps)
        self.log(logs, start_time)

    def _evaluate_and_save(self: Any, grad_norm: Any, *about: Any) -> None:
        if self.control.should_evaluate or self.control.should_save:
            self.control.should_log = False
            super()._maybe_log_save_evaluate(self._tr_loss, grad_norm, *about)  # type: ignore[misc]


def _without_labels(part: Any) -> Any:
    """A part of a batch in which the Trainer counts no labels."""
    names = [one for one in ("labels", "shift_labels") if one in part and isinstance(part[one], torch.Tensor)]
    return {**part, **{name: part[name][:0] for name in names}} if names else part
