"""Refuses what a sharded state cannot recover, with its name and what to do instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from nbelastic.errors import StateError
from nbelastic.sharded.parameters import plain_name
from nbelastic.state import optimizers
from nbelastic.state.checks import check_dense
from nbelastic.state.contents import LARGE
from nbelastic.state.layout import Layout


def check_small(values: Mapping[str, Any]) -> None:
    """StateError if a value given to `ShardedState()` belongs into `bind`."""
    for name, value in values.items():
        if isinstance(value, (*LARGE, LRScheduler)):
            kind = type(value).__name__
            raise StateError(
                f"{name} is {'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}: make it inside the elastic function, "
                f"after fully_shard, and give it to bind({name}=…) instead of ShardedState({name}=…)."
            )


class Layers(Layout):
    """The plain names of parameters, and the layers that have some. FSDP2 sets other parameters of the same names meanwhile."""

    def check(self) -> None:
        """StateError if one was added, replaced or removed."""
        if self.changed():
            raise StateError(
                "a layer or parameter was added, replaced or removed after bind(), and a commit would lack its values: make the "
                "whole model before fully_shard and bind()."
            )

    def _has_the_same(self, other: Layout) -> bool:
        mine, theirs = ([[*map(plain_name, names)] for names in one._names] for one in (self, other))
        return mine == theirs and _ids_with_parameters(self) == _ids_with_parameters(other)


def _ids_with_parameters(layout: Layout) -> list[int]:
    return [id(layer) for layer in layout._inner if any(one is not None for one in layer._parameters.values())]


def check_replicated(name: str, value: Any) -> None:
    """StateError if a value that each rank has as a whole holds a tensor that is split over the ranks of this world."""
    if any(isinstance(tensor, DTensor) for tensor in optimizers.tensors_in(value)):
        raise StateError(
            f"{name} holds a tensor that is sharded over the ranks of this world (DTensor), which the next world cannot use: "
            "give bind() the models and optimizers whose parameters these are, and keep an average in a model of its own. "
            "Of a norm that clip_grad_norm_ returns, keep norm.full_tensor().item()."
        )


def check_attributes(name: str, optimizer: torch.optim.Optimizer, known: Collection[torch.Tensor]) -> None:
    """StateError if an optimizer keeps sharded tensors as attributes of its own, which are in no commit. A number is not split."""
    for key, value in vars(optimizer).items():
        if key not in ("state", "param_groups", "defaults"):
            tensors = optimizers.tensors_in(value)
            if any(isinstance(tensor, DTensor) and tensor.dim() and tensor not in known for tensor in tensors):
                raise StateError(
                    f"{name} keeps sharded tensors in its attribute {key!r}, which no commit has: keep them in {name}.state, as "
                    "entries of the parameters. If no later step needs them, delete the attribute before commit()."
                )


def is_scalar(value: Any) -> bool:
    """Whether it is the same number, or the like, on all ranks, and not split over them."""
    return not isinstance(value, torch.Tensor) or (not isinstance(value, DTensor) and value.dim() == 0)


def check_entry(what: str, parameter: torch.Tensor, value: torch.Tensor) -> None:
    """StateError if an optimizer's tensor is not split as its parameter is."""
    sharded = isinstance(parameter, DTensor), isinstance(value, DTensor)
    if value.is_meta:
        raise StateError(
            f"{what} on the meta device, since its constructor: call model.to_empty(device=nbe.device()) before it is made, "
            "and give bind() an init function."
        )
    same = value.shape == parameter.shape and sharded[0] == sharded[1]
    if same and sharded[0]:
        same = value.placements == parameter.placements
    if not same:
        raise StateError(
            f"{what}, which is not split as the parameter is: ShardedState cannot re-shard it. "
            "Use an optimizer that keeps tensors of the parameter's shape, such as AdamW or SGD."
        )


def check_container(what: str, value: Any) -> None:
    """StateError if it holds tensors: nothing says how they are split."""
    if isinstance(value, (dict, list, tuple)) and not all(map(is_scalar, optimizers.tensors_in(value))):
        raise StateError(
            f"{what}, with tensors inside of a {type(value).__name__}: ShardedState cannot re-shard them. "
            "Use an optimizer that keeps each tensor as an entry of its own, such as AdamW or SGD."
        )


def check_module(name: str, module: torch.nn.Module) -> None:
    """StateError if ShardedState cannot recover `module`."""
    kinds = {base.__name__ for one in module.modules() for base in type(one).__mro__}
    if "FullyShardedDataParallel" in kinds:
        raise StateError(f"{name} is sharded with FullyShardedDataParallel (FSDP1): use fully_shard (FSDP2).")
    if "DistributedDataParallel" in kinds:
        raise StateError(
            f"{name} is wrapped in DistributedDataParallel: use fully_shard, or TorchState for whole models."
        )
    if type(module).__module__.split(".")[0] == "deepspeed":
        raise StateError(f"{name} is DeepSpeed's {type(module).__name__}: use fully_shard (FSDP2).")
    for key, parameter in module.named_parameters():
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        if type(local) is not torch.Tensor:
            raise StateError(
                f"{name}.{key} is stored as {type(local).__name__}: ShardedState keeps plain tensors only."
            )
    check_dense(name, module)
    for key, buffer in module.named_buffers():
        if isinstance(buffer, DTensor) and not all(placement.is_replicate() for placement in buffer.placements):
            raise StateError(
                f"the buffer {name}.{key} is sharded: ShardedState keeps buffers that are whole on each rank."
            )


def check_optimizer(name: str, optimizer: torch.optim.Optimizer) -> None:
    """StateError if ShardedState cannot recover `optimizer`."""
    kinds = {base.__name__ for base in type(optimizer).__mro__}
    if "LBFGS" in kinds:
        raise StateError(f"{name} is LBFGS, which changes parameters within a step: it cannot be recovered.")
    if "ZeroRedundancyOptimizer" in kinds or type(optimizer).__module__.split(".")[0] == "deepspeed":
        raise StateError(f"{name} is {type(optimizer).__name__}: use a plain torch.optim optimizer with fully_shard.")
