"""Hugging Face's Trainer in an elastic job: `train(trainer)` in place of `trainer.train()`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import PartialState
from torch.utils.data import IterableDataset
from transformers import ProgressCallback, Trainer
from transformers.trainer_utils import TrainOutput

from nbelastic.errors import StateError, UsageError
from nbelastic.integrations.accelerate import OneGpuAccelerator, make_bare, renew_states
from nbelastic.integrations.accelerate_sharding import sharding_plugin, unchanged_environment
from nbelastic.integrations.elastic_trainer import ElasticTrainer, Run, Steps, data_of
from nbelastic.integrations.global_batches import GlobalBatches
from nbelastic.integrations.label_counts import ignores_label_count
from nbelastic.integrations.trainer_progress import USER_WORDS, TrainerProgress
from nbelastic.integrations.trainer_sharding import Sharding, allow_fsdp
from nbelastic.programs.elastic import elastic, frameworks
from nbelastic.sharded.state import ShardedState
from nbelastic.state.checks import check
from nbelastic.state.contents import is_writable
from nbelastic.state.state import TorchState
from nbelastic.worker import ranks

# The arguments of a Trainer that an elastic training changes.
ARGUMENTS = ("gradient_accumulation_steps", "average_tokens_across_devices", "ignore_data_skip", "eval_on_start")

allow_fsdp()


def train(trainer: Trainer, *, global_batch: int | None = None) -> TrainOutput:
    """Train in worlds that change; returns what `trainer.train()` returns. One per job, as it is an elastic function.

    After a change of the world, `Trainer.train` begins again from the last step that all ranks have made. Each step uses
    `global_batch` samples in any world, and each epoch uses every sample once. Without `global_batch` it is the batch of the
    first world: its size x per_device_train_batch_size x gradient_accumulation_steps. With fewer ranks, each rank splits its
    larger share into parts of at most per_device_train_batch_size samples, and accumulates their gradients.

    UsageError for a Trainer that cannot be elastic.
    """
    _check(trainer)
    if trainer.optimizer is None:
        trainer.create_optimizer()
    trainer.optimizer = _bare(trainer.optimizer)
    progress = TrainerProgress()
    progress.global_batch = global_batch or 0
    progress.begin(trainer)
    progress.learning_rates = [group.get("initial_lr", group["lr"]) for group in trainer.optimizer.param_groups]
    values: dict[str, Any] = {"progress": progress}
    if trainer.accelerator.scaler is not None:
        values["scaler"] = trainer.accelerator.scaler
    state: TorchState | ShardedState
    if trainer.is_fsdp_enabled:
        state = ShardedState(**values)
        run = Run(state, progress, Sharding(trainer, state))
    else:
        state = TorchState(model=trainer.model, optimizer=trainer.optimizer, **(_other_models(trainer) | values))
        run = Run(state, progress)
    state._contents.user_words = USER_WORDS
    accumulated = trainer.args.gradient_accumulation_steps
    with _elastic(trainer, run):
        return elastic(_train_in_this_world)(state, trainer, accumulated)


def _other_models(trainer: Any) -> dict[str, torch.nn.Module]:
    """Models that it holds beside its own, by name: callbacks may move them, as a reference model that follows slowly.

    What a state cannot keep is left out, as quantized models and metrics: nothing moves them.
    """
    own = set(_tensors(trainer.model))
    held = {name: value for name, value in vars(trainer).items() if isinstance(value, torch.nn.Module)}
    return {
        name: value for name, value in held.items() if not own.issuperset(_tensors(value)) and _can_be_kept(name, value)
    }


def _can_be_kept(name: str, model: torch.nn.Module) -> bool:
    plain = all(type(one) in (torch.Tensor, torch.nn.Parameter) and not one.is_meta for one in _tensors(model))
    if name.startswith("_") or hasattr(TorchState, name) or not plain:
        return False
    try:
        check(name, model)
    except StateError:
        return False
    return all(map(is_writable, model.parameters()))


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _train_in_this_world(_state: TorchState | ShardedState, trainer: Any, accumulated: int) -> TrainOutput:
    args, progress = trainer.args, trainer._elastic.progress
    part = args.per_device_train_batch_size
    if not progress.global_batch:
        progress.global_batch = batch = ranks.size() * part * accumulated
        if ranks.rank() == 0:
            print(
                f"nbelastic: each step uses {batch} samples in any world, as in the first world, which has {ranks.size()} "
                f"ranks. Write train(trainer, global_batch={batch}) to have that whatever the first world is.",
                flush=True,
            )
    trainer._elastic.batches = batches = GlobalBatches(
        trainer.train_dataset,
        progress.global_batch,
        part,
        shuffle=args.train_sampling_strategy == "random",
        seed=args.seed if args.data_seed is None else args.data_seed,
        drop_last=args.dataloader_drop_last,
    )
    args.gradient_accumulation_steps = batches.parts
    args.eval_on_start = args.eval_on_start and not progress.values
    is_over = False
    _enter_world(trainer)
    try:
        output = trainer.train()
        is_over = True
        return output
    finally:
        _leave_world(trainer, is_over)


def _enter_world(trainer: Any) -> None:
    """The Trainer, its arguments and Accelerate have kept the world that they were made in."""
    args, scaler, sharding = trainer.args, trainer.accelerator.scaler, trainer._elastic.sharding
    renew_states(is_sharded=sharding is not None)
    args.distributed_state = PartialState()
    args._n_gpu = 0 if ranks.device().type == "cpu" else 1
    vars(args)["_setup_devices"] = ranks.device()
    (args.accelerator_config.gradient_accumulation_kwargs or {}).pop("num_steps", None)  # the Trainer has added it
    with unchanged_environment():
        trainer.create_accelerator_and_postprocess()
    trainer.accelerator.__class__ = OneGpuAccelerator
    if sharding is not None:
        sharding.enter()
    trainer.accelerator.scaler = scaler
    trainer.accelerator.free_memory = lambda *objects: list(objects)  # it holds nothing yet; collecting takes 0.2 s
    vars(trainer).pop("_eval_dataloaders", None)


def _leave_world(trainer: Any, is_over: bool) -> None:
    """Keep no reference to DDP: its old process group would stay open. A sharded model stays as it is after the training."""
    sharding = trainer._elastic.sharding
    trainer.model_wrapped = trainer.model
    make_bare(trainer.model)
    if (noise := getattr(trainer, "neftune_hook_handle", None)) is not None:
        noise.remove()  # each world adds one
    trainer.optimizer = _bare(trainer.optimizer)
    if sharding is None or not is_over:
        trainer.accelerator._models.clear()
        trainer.accelerator._optimizers.clear()
    if sharding is not None and not is_over:
        sharding.leave()
    trainer.callback_handler.optimizer = trainer.optimizer
    trainer.callback_handler.train_dataloader = None
    for callback in trainer.callback_handler.callbacks:
        for bar in ("training_bar", "prediction_bar") if isinstance(callback, ProgressCallback) else ():
            if (open_bar := getattr(callback, bar)) is not None:
                open_bar.close()  # else it is drawn again beside those of the next program
                setattr(callback, bar, None)
        if not trainer.is_world_process_zero() and hasattr(callback, "setup") and hasattr(callback, "_initialized"):
            callback._initialized = False  # as W&B's: only rank 0 has begun a run, and this rank may become rank 0


@contextmanager
def _elastic(trainer: Any, run: Run) -> Iterator[None]:
    """Make this Trainer elastic, and an ordinary one again at the end."""
    kind, steps = type(trainer), Steps(trainer)
    before = {
        name: getattr(trainer, name) for name in ("model_init", "model_accepts_loss_kwargs", "loss_is_scaled_for_ga")
    }
    arguments = {name: vars(trainer.args)[name] for name in ARGUMENTS}
    trainer.args.ignore_data_skip = False  # nothing is read to skip it
    if ignores_label_count(trainer, *data_of(trainer)):
        trainer.model_accepts_loss_kwargs = trainer.loss_is_scaled_for_ga = False
        trainer.args.average_tokens_across_devices = False
    trainer.__class__ = type(kind.__name__, (ElasticTrainer, kind), {})
    trainer._elastic, trainer.model_init = run, None  # the model is made: each world would make another one
    trainer.add_callback(steps)
    frameworks().forget(trainer.accelerator)
    try:
        yield
    finally:
        trainer.__class__ = kind
        vars(trainer).update(before)
        vars(trainer.args).update(arguments)
        trainer.remove_callback(steps)
        del trainer._elastic


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that Accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _check(trainer: Any) -> None:
    """UsageError if this Trainer cannot be elastic."""
    args, dataset = trainer.args, trainer.train_dataset
    if trainer.is_deepspeed_enabled or trainer.is_distributed_loading_by_transformers:
        raise UsageError(
            "this Trainer shards its model, and only FSDP2 is elastic in it: TrainingArguments(fsdp=True, …), or write the "
            "loop with nbe.ShardedState and PyTorch's fully_shard."
        )
    if trainer.is_fsdp_enabled:
        sharding_plugin(trainer.accelerator.state.fsdp_plugin)
    if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
        raise UsageError(
            f"a {type(dataset).__name__} has no length or no indices, so its samples cannot be shared among ranks that come "
            "and go: give the Trainer a data set with a length, whose samples have indices."
        )
    for name in ("get_train_dataloader", "_get_train_sampler", "_get_dataloader"):
        if getattr(getattr(trainer, name), "__func__", None) is not getattr(Trainer, name):
            raise UsageError(
                f"{type(trainer).__name__} has its own {name}(), whose batches would not be elastic: "
                "give train_dataset and data_collator to the Trainer instead. torch.utils.data.Subset chooses samples. "
                "Or run the program as a script."
            )
    if args.train_sampling_strategy not in ("random", "sequential"):
        raise UsageError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} gives each world other batches: "
            'use "random" or "sequential".'
        )
    if args.auto_find_batch_size:
        raise UsageError("auto_find_batch_size would differ between ranks: set per_device_train_batch_size.")
