"""FSDP2 in an elastic Accelerator: what `prepare` shards is bound to the ShardedState of the elastic function."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.scheduler import AcceleratedScheduler
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.optim.lr_scheduler import LRScheduler

from nbelastic.errors import UsageError
from nbelastic.integrations.unsharded import Unsharded
from nbelastic.sharded.parameters import plain_name
from nbelastic.sharded.state import ShardedState
from nbelastic.state.optimizers import set_settings, settings
from nbelastic.worker import session

USE_FSDP = "ACCELERATE_USE_FSDP"
FIRST = "_nbelastic_first"  # a model's attribute, so that it ends with the model


class Sharding:
    """What Accelerate reads of a ParallelismConfig, for a mesh that has one dimension."""

    fsdp_dim_names = ("shard",)
    tp_enabled = cp_enabled = sp_enabled = False


def sharding_plugin(plugin: Any) -> Any:
    """The plugin that an Accelerator is given or that its environment asks for. UsageError if it cannot be elastic."""
    if plugin is None and os.environ.get(USE_FSDP, "false").lower() == "true":
        plugin = FullyShardedDataParallelPlugin()
    if plugin is None:
        return None
    if plugin.fsdp_version != 2:
        raise UsageError(
            "FSDP1 is not elastic, and FSDP2 is: write FullyShardedDataParallelPlugin(fsdp_version=2, …), or "
            'fsdp_config={"version": 2} for a Trainer.'
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise UsageError("cpu_offload is not elastic: leave it out of the options of FSDP.")
    return plugin


@contextmanager
def unchanged_environment() -> Iterator[None]:
    """An Accelerator with a plugin sets a variable, with which each later Accelerator of this worker would shard too."""
    before = os.environ.get(USE_FSDP)
    try:
        yield
    finally:
        os.environ.pop(USE_FSDP, None)
        if before is not None:
            os.environ[USE_FSDP] = before


def prepare_and_bind(
    accelerator: Any, prepare: Callable[..., Any], values: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Collective: call Accelerate's `prepare`, and bind the model, its optimizers and schedulers."""
    model = next((one for one in values if isinstance(one, torch.nn.Module)), None)
    if model is None:
        prepared = prepare(*values, **options)
        if any(isinstance(one, AcceleratedScheduler) for one in _as_tuple(prepared)):
            raise UsageError(
                "prepare the scheduler in the same call as the model and its optimizer: recovery restores it."
            )
        return prepared
    state = _present_state()
    given = [one for one in values if isinstance(one, torch.optim.Optimizer)]
    groups = [_names_in_groups(model, one) for one in given]
    first = vars(model).pop(FIRST, None)
    if first is not None:
        groups = [first.groups.get(one, names) for one, names in zip(given, groups, strict=True)]
        first.restore(empty=state._choice is not None)
        _set_parameters(model, given, groups)
    elif isinstance(getattr(model, "_orig_mod", model), FSDPModule):
        raise UsageError(
            "this model is sharded already: give prepare() the whole model, which it shards in each world."
        )
    else:
        first = First(model, given, [one for one in values if isinstance(one, LRScheduler)])
    vars(model)[FIRST] = accelerator.first = first
    with _sends_first_values(accelerator.state.fsdp_plugin, model, state):
        prepared = prepare(*values, **options)
    found = _as_tuple(prepared)
    (model,) = (one for one in found if isinstance(one, torch.nn.Module))
    first.unsharded.sharded()
    _set_parameters(model, given, groups)
    schedulers = [one.scheduler for one in found if isinstance(one, AcceleratedScheduler)]
    state.bind(model=model, **_numbered("optimizer", given), **_numbered("scheduler", schedulers))
    return prepared


class First:
    """What `prepare` was given at first, as it was then. The program may make it once and give it again in each world."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
        self.unsharded = Unsharded(model)
        self.groups = {one: _names_in_groups(model, one) for one in optimizers}
        self._settings = {one: copy.deepcopy(settings(one)) for one in optimizers}
        self._schedules = {one: copy.deepcopy(one.state_dict()) for one in schedulers}

    def committed(self) -> None:
        """After the first whole commit no rank needs the values of the whole model any more."""
        if _present_state()._holdings.recoverable:
            self.unsharded.forget_values()

    def restore(self, *, empty: bool) -> None:
        self.unsharded.restore(empty=empty)
        for optimizer, values in self._settings.items():
            optimizer.state.clear()
            set_settings(optimizer, copy.deepcopy(values))
        for schedule, state in self._schedules.items():
            schedule.load_state_dict(copy.deepcopy(state))


def _names_in_groups(model: torch.nn.Module, optimizer: Any) -> list[list[str | None]]:
    names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
    return [[names.get(one) for one in group["params"]] for group in optimizer.param_groups]


@contextmanager
def _sends_first_values(plugin: Any, model: torch.nn.Module, state: ShardedState) -> Iterator[None]:
    """Accelerate can send rank 0's values to the others, which is collective. Not if a commit or a checkpoint has them.

    A model on the meta device has no values. Only some ranks have such a model in a later world: newcomers have a whole one.
    """
    sends = plugin.cpu_ram_efficient_loading
    is_filled = state._choice is not None or state._start.path is not None
    plugin.cpu_ram_efficient_loading = sends and not is_filled and not any(one.is_meta for one in model.parameters())
    try:
        yield
    finally:
        plugin.cpu_ram_efficient_loading = sends


def _set_parameters(model: torch.nn.Module, given: list[Any], groups: list[list[list[str | None]]]) -> None:
    """Accelerate finds an optimizer's new parameters by the addresses of the old ones, which are all 0 on the meta device."""
    present = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    for optimizer, wanted in zip(given, groups, strict=True):
        for group, names in zip(optimizer.param_groups, wanted, strict=True):
            group["params"] = [
                parameter if name is None else present[name]
                for name, parameter in zip(names, group["params"], strict=True)
            ]


def _present_state() -> ShardedState:
    """The state of the elastic function. UsageError if it is not for sharded models."""
    state = state_of_function()
    if not isinstance(state, ShardedState):
        raise UsageError(
            f"FSDP2 needs an nbe.ShardedState, and the state of this elastic function is {type(state).__name__}: give "
            "nbe.ShardedState(…) samplers and counters. prepare() gives it the model, the optimizer and the scheduler."
        )
    return state


def state_of_function() -> Any:
    """The state of the elastic function that runs; None if none does."""
    return getattr(session.current().holder, "state", None)


def _numbered(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """`name`, then `name_2` and so on."""
    return {f"{name}_{number}" if number > 1 else name: one for number, one in enumerate(values, 1)}


def _as_tuple(prepared: Any) -> tuple[Any, ...]:
    return tuple(prepared) if isinstance(prepared, (tuple, list)) else (prepared,)
