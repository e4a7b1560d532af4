"""Buffers that a forward pass makes or enlarges, such as masks and rotary tables: one model has them, and another not yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbelastic.state.transfer import shape_of

Buffers = dict[str, torch.Tensor | None]  # of one layer, by name


def differing_caches(
    module: torch.nn.Module, received: Mapping[str, Any], name_of: Callable[[str], str] = str
) -> dict[str, tuple[Buffers, str, Any]]:
    """The caches whose shape or type differs from that of the same model on another rank or in a checkpoint.

    By name: the layer's buffers, the key in them, and what was received; None: it is not there. A buffer that is saved is a
    cache only while it is None here. `name_of` gives the name in `received`.
    """
    found: dict[str, tuple[Buffers, str, Any]] = {}
    seen: set[int] = set()
    for path, layer in module.named_modules():
        unsaved = getattr(layer, "_non_persistent_buffers_set", ())
        for key, mine in layer._buffers.items():
            name = name_of(f"{path}.{key}" if path else key)
            there = received.get(name)
            differs = shape_of(getattr(mine, "_local_tensor", mine)) != shape_of(there)
            if differs and (mine is None or key in unsaved) and id(mine) not in seen:
                found[name] = layer._buffers, key, there
            if mine is not None:
                seen.add(id(mine))  # `named_buffers` names a shared one once
    return found
