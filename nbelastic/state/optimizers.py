"""What an optimizer holds, as plain data and tensors, and how to make it hold that again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from nbelastic.errors import StateError

_ATOMS = (int, float, str, bool, bytes, type(None))


def frozen(value: Any) -> Any:
    """A copy that nothing else changes."""
    return value if isinstance(value, _ATOMS) else copy.deepcopy(value)


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """What it keeps for its parameters, such as momentum."""
    found = [
        value for kept in optimizer.state.values() for value in (kept.values() if isinstance(kept, dict) else (kept,))
    ]
    return [value for value in found if isinstance(value, torch.Tensor)]


def shared(optimizer: Optimizer) -> dict[Any, Any]:
    """What it keeps for itself and not for a parameter, under keys of its own."""
    return {key: kept for key, kept in optimizer.state.items() if not isinstance(key, torch.Tensor)}


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
        "shared": shared(optimizer),
    }


def check_groups(name: str, optimizer: Optimizer, wanted: dict[str, Any], names: Mapping[torch.Tensor, str]) -> None:
    """StateError if `regroup` cannot give it the groups that the sender's has."""
    theirs, known = wanted["names"], set(names.values())
    mine = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if any(here != there for here, there in zip(mine, theirs, strict=False)):
        raise StateError(f"{name} has other parameters in its groups here than in the state that is received.")
    missing = [key for group in theirs[len(mine) :] for key in group if key not in known]
    if missing:
        raise StateError(f"{name} has a group with {missing[0]} in the state that is received, and none here.")


def regroup(optimizer: Optimizer, wanted: dict[str, Any], names: Mapping[torch.Tensor, str]) -> None:
    """Give it the groups that the sender's has, made of the same parameters."""
    by_name = {known: p for p, known in names.items()}
    theirs, mine = wanted["names"], optimizer.param_groups
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
    for key in shared(optimizer):
        del optimizer.state[key]
    optimizer.state.update(received.get("shared", {}))  # a checkpoint of an older version has none
    put_settings(optimizer, received["groups"])


Entries = dict[Any, Any]


def entries(optimizer: Optimizer) -> Entries:
    """What it keeps for each parameter: the tensors themselves, not what they contain, and copies of the rest."""
    return {key: _noted(kept) for key, kept in optimizer.state.items()}


def put_entries(optimizer: Optimizer, noted: Entries) -> None:
    """Keep these again, and forget what has come since."""
    for key in [key for key in optimizer.state if key not in noted]:
        del optimizer.state[key]
    optimizer.state.update({key: _noted(kept) for key, kept in noted.items()})


def _noted(kept: Any) -> Any:
    if isinstance(kept, dict):
        return {key: _noted(value) for key, value in kept.items()}
    return kept if isinstance(kept, torch.Tensor) else frozen(kept)
