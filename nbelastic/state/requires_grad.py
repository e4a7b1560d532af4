"""Which parameters are trained. A loop may freeze and unfreeze layers, so this is part of a commit."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def requires_grad(parameters: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    """Whether each parameter is trained, by name."""
    return {name: parameter.requires_grad for name, parameter in parameters.items()}


def set_requires_grad(parameters: Mapping[str, torch.Tensor], wanted: Mapping[str, bool]) -> None:
    """The inverse of `requires_grad`. Parameters without a name in `wanted` stay as they are."""
    for name, parameter in parameters.items():
        if parameter.requires_grad != wanted.get(name, parameter.requires_grad):
            parameter.requires_grad_(wanted[name])
