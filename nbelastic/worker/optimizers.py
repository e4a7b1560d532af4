"""What an optimizer holds, as plain data and tensors, and how to make it hold that again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from nbelastic.core.errors import StateError

_ATOMS = (int, float, str, bool, bytes, type(None))


def frozen(value: Any) -> Any:
    """A copy that nothing else changes."""
    return value if isinstance(value, _ATOMS) else copy.deepcopy(value)


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """What it keeps for its parameters, such as momentum."""
    return [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, torch.Tensor)]


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each group's learning rate and so on."""
    return [{k: frozen(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def put_settings(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Groups that were added since are taken away."""
    del optimizer.param_groups[len(groups) :]
    for group, kept in zip(optimizer.param_groups, groups, strict=True):
        group.update({k: frozen(v) for k, v in kept.items()})


def contents(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
    """All of it, live, in the shape in which it is sent: settings, the names of each group's parameters, the rest."""
    return {
        "groups": settings(optimizer),
        "names": [[names[p] for p in group["params"]] for group in optimizer.param_groups],
        "state": [dict(optimizer.state.get(p, {})) for p in parameters(optimizer)],
    }


def regroup(name: str, optimizer: Optimizer, wanted: dict[str, Any], names: Mapping[torch.Tensor, str]) -> None:
    """Give it the groups that the sender's has, made of the same parameters. StateError if that cannot be."""
    by_name = {known: p for p, known in names.items()}
    theirs = wanted["names"]
    mine = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if any(here != there for here, there in zip(mine, theirs, strict=False)):
        raise StateError(f"{name} has other parameters in its groups here than in the state that is received.")
    missing = [key for group in theirs[len(mine) :] for key in group if key not in by_name]
    if missing:
        raise StateError(f"{name} has a group with {missing[0]} in the state that is received, and none here.")
    del optimizer.param_groups[len(theirs) :]
    for group, kept in zip(theirs[len(mine) :], wanted["groups"][len(mine) :], strict=True):
        optimizer.add_param_group({**kept, "params": [by_name[key] for key in group]})


def put(optimizer: Optimizer, received: dict[str, Any]) -> None:
    """The inverse of `contents`, for an optimizer with the same groups."""
    for parameter, kept in zip(parameters(optimizer), received["state"], strict=True):
        if kept:
            optimizer.state[parameter] = kept
        else:
            optimizer.state.pop(parameter, None)
    put_settings(optimizer, received["groups"])


Entries = dict[torch.Tensor, dict[str, Any]]


def entries(optimizer: Optimizer) -> Entries:
    """What it keeps for each parameter: the tensors themselves, not what they contain, and copies of the rest."""
    return {
        parameter: {key: value if isinstance(value, torch.Tensor) else frozen(value) for key, value in kept.items()}
        for parameter, kept in optimizer.state.items()
    }


def put_entries(optimizer: Optimizer, noted: Entries) -> None:
    """Keep these again, and forget what has come since."""
    for parameter in [p for p in optimizer.state if p not in noted]:
        del optimizer.state[parameter]
    for parameter, kept in noted.items():
        now = {key: value if isinstance(value, torch.Tensor) else frozen(value) for key, value in kept.items()}
        optimizer.state[parameter] = now
