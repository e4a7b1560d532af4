"""Refuses values that a state cannot recover, with their name and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nbelastic.errors import StateError
from nbelastic.state.optimizers import frozen
from nbelastic.system.log_line import print_line

SHARDED = (
    "{name} is sharded over ranks (FSDP, DTensor), but a state needs the whole model on every rank. "
    "Use DistributedDataParallel, or nbe.ShardedState for a sharded model."
)
_PARTITIONED = (
    "{name} is {kind}, which keeps a different part of its state on each rank: it cannot be recovered. "
    "Use a plain torch.optim optimizer."
)


def check(name: str, value: Any) -> None:
    """StateError if `value` cannot be in a state."""
    if isinstance(value, (int, float, str)):
        return
    kinds = {base.__name__ for base in type(value).__mro__}
    if isinstance(value, torch.nn.parallel.DistributedDataParallel):
        raise StateError(
            f"{name} is wrapped in DistributedDataParallel: give the bare model, and wrap it inside the elastic function."
        )
    if isinstance(value, torch.optim.LBFGS):
        raise StateError(f"{name} is LBFGS, which changes parameters within a step: it cannot be recovered.")
    if "ZeroRedundancyOptimizer" in kinds or type(value).__module__.split(".")[0] == "deepspeed":
        raise StateError(_PARTITIONED.format(name=name, kind=type(value).__name__))
    if isinstance(value, torch.Generator):
        raise StateError(
            f"{name} is a torch.Generator: give its get_state() to the state, and restore it with set_state()."
        )
    if "StatefulDataLoader" in kinds:
        raise StateError(
            f"{name} is a StatefulDataLoader, whose position differs between ranks: use nbe.ElasticSampler in a DataLoader, or an nbe.ElasticStream."
        )
    if any(base.__module__.startswith("torchmetrics.") for base in type(value).__mro__):
        raise StateError(
            f"{name} is a metric of torchmetrics, whose sums differ between ranks, and which a state does not keep: leave it out, reset it "
            "at the function's top, and give the results of compute() to the state."
        )
    if isinstance(value, torch.nn.Module):
        if any(map(_is_sharded, value.modules())):
            raise StateError(SHARDED.format(name=name))
        check_dense(name, value)


def _is_sharded(module: torch.nn.Module) -> bool:
    managed = type(module).__name__ == "FullyShardedDataParallel" or hasattr(module, "_is_fsdp_managed_module")
    return managed or any(hasattr(p, "device_mesh") for p in module._parameters.values())


def check_dense(name: str, module: torch.nn.Module) -> None:
    """StateError if a parameter or buffer is sparse or the like: torch neither sends such tensors nor copies their values in place."""
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout is not torch.strided:
            raise StateError(
                f"{name}.{key} is not a dense tensor ({tensor.layout}), which a state cannot keep: if it stays as it is, make it a "
                f"plain attribute (self.{key.rpartition('.')[2]} = …) instead of a buffer or parameter."
            )


def check_optimizer_tensors(name: str, tensors: list[torch.Tensor]) -> None:
    """StateError if an optimizer keeps other tensors than plain ones."""
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            kind = type(tensor).__name__
            raise StateError(
                f"{name} keeps {kind} instead of plain tensors, which cannot be sent yet: use a plain torch.optim optimizer."
            )


def frozen_value(name: str, value: Any) -> Any:
    """A copy of a state's value that no other code changes. StateError if autograd still needs a tensor in it."""
    try:
        return frozen(value)
    except RuntimeError as error:
        if "graph leaves" in str(error):
            text = f"{name} holds a tensor that autograd still needs: give its detach() to the state."
            raise StateError(text) from None
        raise


def only_numbers(values: Mapping[str, Any], left_out: set[str]) -> dict[str, float]:
    """The values that are numbers. One line per name on stderr reports any other; `left_out` has the names so far."""
    numbers = {}
    for name, value in values.items():
        try:
            if not isinstance(value, torch.Tensor) or value.numel() == 1:
                numbers[name] = float(value)
                continue
            kind = f"a tensor of {value.numel()}"
        except OverflowError:
            kind = "one of this size"
        except (TypeError, ValueError):
            kind = type(value).__name__
        if name not in left_out:
            left_out.add(name)
            text = f"report({name}=…) is left out: a report is a number, not {kind}."
            print_line(text)
    return numbers
