"""Notices learning rate schedulers that a program has forgotten to give to its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

KNOWN = ("torch.", "nbelastic.state.")  # packages of samplers, gradient scalers and the like, which have no scheduler

FORGOTTEN = (
    "{name} has a learning rate scheduler that is not in the state. After a change of the world, workers that join (of a "
    "sharded model: all) begin its schedule anew: give the scheduler to the state too, or set its position in the program."
)


def without_scheduler(values: Mapping[str, Any]) -> list[str]:
    """The names of the optimizers among `values` for which a scheduler was made that is not among them."""
    named = [(name, value) for name, value in values.items() if isinstance(value, Optimizer) and _is_scheduled(value)]
    return [name for name, optimizer in named if not any(_schedules(value, optimizer) for value in values.values())]


def _is_scheduled(optimizer: Optimizer) -> bool:
    """Whether a scheduler was made for it: each of torch's puts a function of its own in place of `step`."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def _schedules(value: Any, optimizer: Optimizer) -> bool:
    """Whether `value` is a scheduler of this optimizer or a scheduler's state, or an object that may have one in its state."""
    if isinstance(value, LRScheduler):
        return value.optimizer is optimizer
    if isinstance(value, dict) and "last_epoch" in value:
        return True
    is_known = isinstance(value, (Module, Optimizer)) or type(value).__module__.startswith(KNOWN)
    return hasattr(value, "load_state_dict") and not is_known
