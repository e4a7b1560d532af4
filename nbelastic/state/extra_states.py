"""What layers keep beside parameters and buffers: `get_extra_state()` of those that define it, as in torch's `state_dict()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbelastic.state.checks import frozen_value
from nbelastic.state.optimizers import frozen


class ExtraStates:
    """Of the layers of these models, by name. `plain_name` shortens the path of a layer in its model."""

    def __init__(
        self, modules: Mapping[str, torch.nn.Module] | None = None, plain_name: Callable[[str], str] = str
    ) -> None:
        self._layers = {
            f"{name}.{plain_name(f'{path}.').removesuffix('.')}": layer
            for name, module in (modules or {}).items()
            for path, layer in module.named_modules()
            if _has_extra_state(layer)
        }

    def live(self) -> dict[str, Any]:
        return {name: layer.get_extra_state() for name, layer in self._layers.items()}

    def copy(self) -> dict[str, Any]:
        """StateError if autograd still needs a tensor in one."""
        return {name: frozen_value(name, value) for name, value in self.live().items()}

    def set(self, wanted: Mapping[str, Any]) -> None:
        """The inverse of `live` and `copy`. Layers without a name in `wanted` stay as they are."""
        for name, layer in self._layers.items():
            if name in wanted:
                layer.set_extra_state(frozen(wanted[name]))


def _has_extra_state(layer: torch.nn.Module) -> bool:
    own, base = type(layer), torch.nn.Module
    return own.get_extra_state is not base.get_extra_state and own.set_extra_state is not base.set_extra_state
