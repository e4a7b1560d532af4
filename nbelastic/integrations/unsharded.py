"""Undoes `fully_shard` in a model that the program makes once: each world shards it anew, over its own ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._composable_state import _module_state_mapping

STRUCTURE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Unsharded:
    """`model` as it is now: its layers, their classes, parameters, buffers and hooks. Its layers stay the same objects.

    The first values of the parameters are kept until `forget_values`: a rank may die before all ranks have their shards.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._before = {layer: _copied(vars(layer)) for layer in model.modules()}
        self._after: dict[torch.nn.Module, dict[str, Any]] = {}
        self._kinds = {layer: type(layer) for layer in self._before}
        self._values = {one: one.detach() for one in model.parameters()}
        self._buffers = {one: one.detach().clone() for one in model.buffers()}

    def sharded(self) -> None:
        """The model is sharded now: `restore` keeps the attributes that it gets later."""
        self._after = {layer: dict(vars(layer)) for layer in self._before}

    def forget_values(self) -> None:
        """The ranks have a commit: free the memory of the first values."""
        if not any(value.is_meta for value in self._values.values()):
            self._values = {one: torch.empty_like(value, device="meta") for one, value in self._values.items()}

    def restore(self, *, empty: bool) -> None:
        """Make the model what it was. With `empty`, its parameters are on the meta device: a commit will fill them."""
        parameters: dict[Any, Any] = {None: None}
        for one, value in self._values.items():
            data = torch.empty_like(value, device="meta") if empty else value
            parameters[one] = torch.nn.Parameter(data, one.requires_grad)
            vars(parameters[one]).update(vars(one))
        buffers: dict[Any, Any] = {None: None, **{one: value.clone() for one, value in self._buffers.items()}}
        for layer, before in self._before.items():
            _module_state_mapping.pop(layer, None)
            layer.__class__ = self._kinds[layer]
            attributes = _copied(before) | self._kept(layer)
            vars(layer).clear()
            vars(layer).update(attributes)
            layer._parameters = {name: parameters[one] for name, one in before["_parameters"].items()}
            layer._buffers = {name: buffers[one] for name, one in before["_buffers"].items()}

    def _kept(self, layer: torch.nn.Module) -> dict[str, Any]:
        """The attributes of a layer that sharding has not changed."""
        present, before = dict(vars(layer)), self._before[layer]
        after, missing = self._after.get(layer, present), object()
        return {
            name: value
            for name, value in present.items()
            if not _is_structure(name, value) and after.get(name, missing) is before.get(name, missing)
        }


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """The same attributes, with collections of their own."""
    return {name: value.copy() if _is_structure(name, value) else value for name, value in attributes.items()}


def _is_structure(name: str, value: Any) -> bool:
    """Whether it is one of the collections that a module itself consists of."""
    return (
        name in STRUCTURE or name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
    ) and isinstance(value, (dict, set))
