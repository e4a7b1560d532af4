"""The state of optimizers as plain data and tensors, and how to set it again."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from nbelastic.errors import StateError

_ATOMS = (int, float, str, bool, bytes, type(None))


def frozen(value: Any) -> Any:
    """A copy that no other code changes."""
    return value if isinstance(value, _ATOMS) else copy.deepcopy(value)


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors that it keeps for its parameters, such as momentum."""
    return tensors_in(list(optimizer.state.values()))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in dicts, lists and tuples, however deep."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    elif type(value) in (list, tuple):
        for item in value:
            _collect(item, found)


def inner(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Optimizers that it holds as attributes, as SAM does, or in lists and dicts, and that keep tensors of their own; by name."""
    held = dict(vars(optimizer))
    if "state" in held:  # else it may compute its own from theirs
        for name in held.keys() - {"state", "param_groups", "defaults"}:
            value = held[name]
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            held |= {f"{name}[{key!r}]": item for key, item in items if isinstance(item, Optimizer)}
    found = {name: value for name, value in held.items() if isinstance(value, Optimizer)}
    return {name: value for name, value in found.items() if value.state is not optimizer.state}


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks can be added. A wrapper, as Lookahead, may not call the constructor of torch's class, which makes them."""
    return hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks")


def check_inner(named: Mapping[str, Optimizer], call: str) -> None:
    """StateError if one of these holds an optimizer that is not among them. `call`: the name of what takes them."""
    for name, optimizer in named.items():
        for key, held in inner(optimizer).items():
            if all(held is not known for known in named.values()):
                new = re.sub(r"\W+", "_", key).strip("_")
                raise StateError(
                    f"{name}.{key} is an optimizer of its own, whose tensors would be lost: give it to the state too, "
                    f"as {call}({name}={name}, {new}={name}.{key}, …)."
                )


def shared(optimizer: Optimizer) -> dict[Any, Any]:
    """The entries of its state that belong to no parameter."""
    return {key: entry for key, entry in optimizer.state.items() if not isinstance(key, torch.Tensor)}


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group, such as the learning rate."""
    return [{k: frozen(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


Group = tuple[dict[str, Any], list[torch.Tensor], dict[str, Any]]  # itself, its parameters and its options


def groups(optimizer: Optimizer) -> list[Group]:
    """Its parameter groups as they are now: a program may change, replace, add and remove some."""
    kept = zip(optimizer.param_groups, settings(optimizer), strict=True)
    return [(group, [*group["params"]], options) for group, options in kept]


def set_groups(optimizer: Optimizer, recorded: Sequence[Group]) -> None:
    """Make its groups those that `groups` returned."""
    optimizer.param_groups[:] = [group for group, _, _ in recorded]
    for group, members, _ in recorded:
        group["params"] = [*members]
    set_settings(optimizer, [options for _, _, options in recorded])


def set_settings(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Set the options of each group, and remove groups that were added since.

    A tensor, such as a learning rate on the GPU, stays the same object: a CUDA graph may read it.
    """
    del optimizer.param_groups[len(groups) :]
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for key, value in options.items():
            present = group.get(key)
            if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor) and present.shape == value.shape:
                with torch.no_grad():
                    present.copy_(value)
            else:
                group[key] = frozen(value)


def contents(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
    """All of its live state, in the form in which it is sent: class, options, names of each group's parameters, entries."""
    return {
        "kind": type(optimizer).__name__,
        "groups": settings(optimizer),
        "names": [[names[p] for p in group["params"]] for group in optimizer.param_groups],
        "state": [dict(optimizer.state.get(p, {})) for p in parameters(optimizer)],
        "shared": shared(optimizer),
    }


def check_groups(name: str, optimizer: Optimizer, wanted: dict[str, Any], names: Mapping[torch.Tensor, str]) -> None:
    """StateError if the sender's optimizer is of another class, or if `regroup` cannot make its groups."""
    check_kind(name, optimizer, wanted.get("kind"), "the received state: make the same optimizer.")
    theirs, known = wanted["names"], set(names.values())
    mine = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if any(here != there for here, there in zip(mine, theirs, strict=False)):
        raise StateError(f"the groups of {name} have other parameters here than in the received state.")
    missing = [key for group in theirs[len(mine) :] for key in group if key not in known]
    if missing:
        raise StateError(f"{name} has a group with {missing[0]} in the received state, and none here.")


def check_kind(name: str, optimizer: Optimizer, wanted: str | None, source: str) -> None:
    """StateError if the optimizer is of the class `wanted` there: its entries mean something else. None: it is not known."""
    kind = type(optimizer).__name__
    if wanted not in (None, kind):
        raise StateError(f"the class of {name} is {kind} here and {wanted} in {source}")


def regroup(optimizer: Optimizer, wanted: dict[str, Any], names: Mapping[torch.Tensor, str]) -> None:
    """Make the sender's groups, of the same parameters."""
    by_name = {known: p for p, known in names.items()}
    theirs, mine = wanted["names"], optimizer.param_groups
    del optimizer.param_groups[len(theirs) :]
    for group, kept in zip(theirs[len(mine) :], wanted["groups"][len(mine) :], strict=True):
        optimizer.add_param_group({**kept, "params": [by_name[key] for key in group]})


def grown(own: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]], known: Collection[str]) -> list[Sequence[str]]:
    """The groups `own`, as names of parameters, and those that `theirs` has more. Without these if a name is not known, or in `own`."""
    added = [*theirs[len(own) :]]
    used = {key for group in own for key in group}
    fits = all(key in known and key not in used for group in added for key in group)
    return [*own, *(added if fits else ())]


def set_contents(optimizer: Optimizer, received: dict[str, Any]) -> None:
    """The inverse of `contents`, for an optimizer with the same groups."""
    for parameter, entry in zip(parameters(optimizer), received["state"], strict=True):
        if entry:
            optimizer.state[parameter] = entry
        else:
            optimizer.state.pop(parameter, None)
    for key in shared(optimizer):
        del optimizer.state[key]
    optimizer.state.update(received.get("shared", {}))  # checkpoints of older versions have none
    set_settings(optimizer, received["groups"])


Entries = dict[Any, Any]


def entries(optimizer: Optimizer) -> Entries:
    """Its state per parameter: the live tensors themselves, and copies of the rest."""
    return {key: _without_copying_tensors(entry) for key, entry in optimizer.state.items()}


def set_entries(optimizer: Optimizer, recorded: Entries) -> None:
    """Set these entries again, and remove those that were added since."""
    for key in [key for key in optimizer.state if key not in recorded]:
        del optimizer.state[key]
    optimizer.state.update({key: _without_copying_tensors(entry) for key, entry in recorded.items()})


def _without_copying_tensors(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {key: _without_copying_tensors(value) for key, value in entry.items()}
    if type(entry) in (list, tuple):
        return type(entry)(map(_without_copying_tensors, entry))
    return entry if isinstance(entry, torch.Tensor) else frozen(entry)
