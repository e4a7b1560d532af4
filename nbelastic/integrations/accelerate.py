"""Accelerate in an elastic function: `from nbelastic.integrations.accelerate import Accelerator`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from accelerate.utils import broadcast_object_list, gather_object, recursively_apply
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from nbelastic.errors import UsageError
from nbelastic.integrations.accelerate_sharding import (
    First,
    Sharding,
    prepare_and_bind,
    sharding_plugin,
    state_of_function,
    unchanged_environment,
)
from nbelastic.integrations.loader_options import options_of, seed_of
from nbelastic.sharded.mesh import device_mesh
from nbelastic.state.sampler import ElasticSampler, local_batch_size
from nbelastic.worker import ranks

OTHERS = ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "parallelism_config")


class Weight:
    """The weight of the batch that an `ElasticLoader` has given last. Accelerate's own active loader may be another one."""

    present = 1.0
    passes = 0  # over elastic loaders: an evaluation may be inside a step


class OneGpuAccelerator(accelerate.Accelerator):  # type: ignore[misc]  # mypy does not follow accelerate
    """Accelerate's own, for a process that sees one GPU: that is `cuda:0` in each process of a host. See `renew_states` too."""

    _is_wrapping = False

    @property
    def local_process_index(self) -> int:
        """Accelerate's own, but for DDP, which takes it for the number of the GPU."""
        return (self.device.index or 0) if self._is_wrapping else int(super().local_process_index)

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._is_wrapping = True
        try:
            return super().prepare_model(model, *args, **kwargs)
        finally:
            self._is_wrapping = False


class Accelerator(OneGpuAccelerator):
    """Accelerate's Accelerator in the present world. Make it inside the elastic function, in each call of it.

    It takes the same arguments. `prepare` takes the bare model, optimizer and scheduler of the state. A DataLoader's
    sampler is an `ElasticSampler`. The prepared loader gives each rank its share of the samples that the epoch has not
    used yet, and records them. Each pass over it is the rest of an epoch. With the sampler's `global_batch`,
    the loader's own batch size does not matter, `backward` weighs the loss, and a scheduler steps once per step.

    With `fsdp_plugin`, the state of the elastic function is a `ShardedState`. One call of `prepare` gets model, optimizer and
    scheduler, and binds them to the state. Make them in the function or once before it.
    """

    first: First | None = None  # with FSDP2, when a model is prepared
    _mesh: Any = None  # while a model is sharded
    _weight = Weight()  # a Trainer's Accelerator, which has no elastic loader, gets this class later
    _has_trained = False  # in this world

    def __init__(self, **options: Any) -> None:
        self._weight = Weight()
        others = [name for name in OTHERS if options.get(name) is not None]
        if others:
            raise UsageError(
                f"{others[0]} shards the model, and only FSDP2 is elastic in Accelerate: use fsdp_plugin, or write the loop "
                "with nbe.ShardedState and PyTorch's fully_shard."
            )
        plugin = sharding_plugin(options.get("fsdp_plugin"))
        renew_states(is_sharded=plugin is not None)
        with unchanged_environment():
            super().__init__(**{"cpu": ranks.device().type == "cpu"} | options | {"fsdp_plugin": plugin})

    def prepare(self, *values: Any, **options: Any) -> Any:
        """Accelerate's own. With FSDP2, it is collective if a model is among the values, and binds them to the state."""
        if not self.is_fsdp2:
            return super().prepare(*values, **options)
        self._mesh = device_mesh() if any(isinstance(one, torch.nn.Module) for one in values) else None
        try:
            return prepare_and_bind(self, super().prepare, values, options)
        finally:
            self._mesh = None

    @property
    def torch_device_mesh(self) -> Any:
        """Accelerate's own, but for `fully_shard`: its default is a mesh of GPUs if torch is built for them."""
        return self._mesh or super().torch_device_mesh

    @property
    def parallelism_config(self) -> Any:
        """Accelerate's own, but for `fully_shard`."""
        return Sharding() if self._mesh is not None else super().parallelism_config

    def _prepare_device_mesh(self) -> None:
        """Loaders share their samples among all ranks."""

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Wrap the bare model, as it was before an earlier world's Accelerator."""
        make_bare(model)
        return super().prepare_model(model, *args, **kwargs)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """UsageError for a loader that chooses samples without an `ElasticSampler`: some would be repeated or left out."""
        sampler = _sampler(data_loader)
        if isinstance(sampler, ElasticSampler):
            if self.split_batches and sampler.global_batch is None:
                raise UsageError(
                    "split_batches=True makes batch_size that of all ranks, and an elastic loader takes that from its sampler: "
                    "write nbe.ElasticSampler(data, global_batch=…)."
                )
            if data_loader.batch_size is None or data_loader.drop_last:
                raise UsageError(
                    "an elastic DataLoader has a batch_size, and neither batch_sampler nor drop_last: make DataLoader(data, "
                    "batch_size=…, sampler=state.sampler). To leave out the last samples, write "
                    "nbe.ElasticSampler(data, global_batch=…, drop_last=True)."
                )
            prepared = ElasticLoader(data_loader, self.device if self.device_placement else None, self._weight)
            self._dataloaders.append(prepared)
            self._step_schedulers_once()
            return prepared
        keeps_order = isinstance(sampler, SequentialSampler) or isinstance(data_loader.dataset, IterableDataset)
        if not keeps_order and not getattr(data_loader, "_is_accelerate_prepared", False):
            raise UsageError(
                f"a DataLoader with a {type(sampler).__name__} would begin its epoch again after each change of the world: "
                "put sampler=nbe.ElasticSampler(data) into the state, and make DataLoader(data, …, sampler=state.sampler). "
                "torch.utils.data.Subset chooses samples. For an evaluation, leave the sampler out."
            )
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Accelerate's own, but for an elastic loader: UsageError, as it begins where the epoch is."""
        if not isinstance(dataloader, ElasticLoader):
            return super().skip_first_batches(dataloader, num_batches)
        if num_batches:
            raise UsageError(
                "an elastic loader gives only the samples that the epoch has not used yet: leave out skip_first_batches."
            )
        return dataloader

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """With a global batch a step has the same samples in any world: the scheduler steps once, and not once per rank."""
        prepared = super().prepare_scheduler(scheduler)
        self._step_schedulers_once()
        return prepared

    def _step_schedulers_once(self) -> None:
        """If a loader has a global batch. The program may prepare it before its scheduler, or after it."""
        samplers = [_sampler(one) for one in self._dataloaders]
        if any(isinstance(one, ElasticSampler) and one.global_batch for one in samplers):
            for scheduler in self._schedulers:
                scheduler.split_batches = True

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """Accelerate's own. Its automatic names go on after the newest folder: each world's Accelerator counts from 0."""
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            folder = Path(self.project_dir) / "checkpoints"
            numbers = [int(one.name.rpartition("_")[2]) for one in folder.glob("checkpoint_*[0-9]")]
            found = [max([project.iteration, *(number + 1 for number in numbers)])]
            project.iteration = broadcast_object_list(found)[0]
        return str(super().save_state(*args, **kwargs))

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Accelerate's own. Not at the beginning of a later world: it would replace the values that were recovered."""
        state = state_of_function()
        if state is None or self._has_trained or not state.commits:
            super().load_state(*args, **kwargs)
        elif self.is_main_process:
            print(f"nbelastic: load_state was left out, as the state of commit {state.commits} is newer.", flush=True)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Accelerate's own, with the weight of this rank's share of the global batch."""
        self._has_trained = True
        if self.first is not None:
            self.first.committed()
        super().backward(loss * self._weight.present, **kwargs)

    def end_training(self) -> None:
        """Finish trackers. Accelerate's own destroys the process group too, which is the elastic loop's."""
        for tracker in self.trackers:
            tracker.finish()

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Accelerate's own, for the unequal shares of an elastic loader too. A repeated sample is left out."""
        loader = self.gradient_state.active_dataloader
        if not isinstance(loader, ElasticLoader):
            return super().gather_for_metrics(input_data, use_gather_object)
        if use_gather_object or not _has_only_tensors(input_data):
            share = loader.shares[self.process_index] if len(input_data) == loader.given else None
            return gather_object(input_data[:share])
        most = max(loader.shares)

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dim() or len(tensor) != loader.given:
                return self.gather(tensor)
            padding = tensor[-1:].expand(most - loader.given, *tensor.shape[1:])
            parts = self.gather(torch.cat([tensor, padding])).split(most)
            return torch.cat([part[:share] for part, share in zip(parts, loader.shares, strict=True)])

        return recursively_apply(gather, input_data)


class ElasticLoader(DataLoaderShard):  # type: ignore[misc]  # mypy does not follow accelerate
    """The batches of this rank. A batch counts as used when it is given: after a break, the commit before it is restored."""

    def __init__(self, loader: DataLoader[Any], device: torch.device | None, weight: Weight) -> None:
        sampler: ElasticSampler = loader.sampler
        batch = loader.batch_size if sampler.global_batch is None else local_batch_size(sampler.global_batch)
        options = {**options_of(loader), "generator": torch.Generator()}
        super().__init__(loader.dataset, device, batch_size=batch, sampler=sampler, **options)
        self.weight = 1.0  # of this rank's mean loss of the present batch
        self.shares: list[int] = []  # how many samples of the present batch count, by rank
        self.given = 0  # samples of this rank, also repeated ones
        self._weight = weight
        self._batch, self._ended_epoch = batch, -1

    def __iter__(self) -> Iterator[Any]:
        sampler: ElasticSampler = self.sampler
        if sampler.epoch == self._ended_epoch:
            sampler.set_epoch(sampler.epoch + 1)
        self.iteration = sampler.epoch
        self.generator.manual_seed(seed_of(sampler.seed, sampler.epoch, sampler.used))
        left, outside = len(sampler), self._weight.present
        self._weight.passes += 1
        try:
            for batch in super().__iter__():
                size = min(self._batch, left)
                left -= size
                self.weight = self._weight.present = sampler.weight(size)
                self.shares, self.given = sampler.shares(size), size
                sampler.record_batch(size)
                self.end()  # an evaluation that was left is no longer the active one
                self.gradient_state._add_dataloader(self)
                yield batch
            self._weight.present = outside
            self._ended_epoch = sampler.epoch
        finally:
            self._weight.passes -= 1
            if self._weight.passes:
                self._weight.present = outside  # that of the batch around this loop, which may have been left


def renew_states(*, is_sharded: bool = False) -> None:
    """Let Accelerate see the present world: its states are singletons, and keep the world that they were made in.

    Accelerate reads the world from torchrun's variables. They are not set: a later program would see an old world in them.
    Accelerate shards on GPUs only. With `is_sharded` it takes a CPU for a GPU until it has read its plugin.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    device = ranks.device()
    on_cpu = device.type == "cpu"
    PartialState._shared_state.update(
        _cpu=on_cpu,
        backend=dist.get_backend(),
        debug=False,
        device=device,
        distributed_type=DistributedType.MULTI_CPU if on_cpu and not is_sharded else DistributedType.MULTI_GPU,
        num_processes=ranks.size(),
        process_index=ranks.rank(),
        local_process_index=ranks.local_rank(),
        fork_launched=False,
        # In place of its method, which takes the local index for the number of the GPU
        wait_for_everyone=partial(dist.barrier, device_ids=None if on_cpu else [device.index]),
    )


def make_bare(model: torch.nn.Module) -> None:
    """Undo what Accelerate has changed of a model for mixed precision: each world would wrap its forward once more."""
    vars(model).pop("_is_accelerate_prepared", None)
    forward = vars(model).pop("_original_forward", None)
    if forward is not None:
        model.forward = forward


def _has_only_tensors(values: Any) -> bool:
    try:
        recursively_apply(lambda one: one, values, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _sampler(loader: Any) -> Any:
    """What chooses the samples of a loader: a batch sampler has a sampler, or chooses them itself."""
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    return loader.sampler if batches is None else getattr(batches, "sampler", batches)
