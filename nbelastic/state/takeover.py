"""The state of a new program takes over the values of the old one's, by name.

Parameters, buffers and what optimizers keep for them are taken wherever name and shape are the same. Small values (counters,
options of optimizers, schedulers) are merged as in a three-way merge: what the user has edited counts, all else goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from nbelastic.errors import StateError
from nbelastic.state import optimizers, rng
from nbelastic.state.optimizers import frozen
from nbelastic.state.state import State
from nbelastic.state.step_log import StepLog
from nbelastic.state.transfer import shape_of

MOST = 4  # names in one note
LONG = 40  # characters; longer names come last


class Taken(NamedTuple):
    """What the user should know, and whether some values are those that each rank has made by itself."""

    notes: list[str]
    may_be_unequal: bool


def initial_values(state: State) -> dict[str, Any]:
    """The small values at the beginning of a program: the base of a later merge."""
    return state._small_values()


def check(state: State) -> None:
    """StateError if this state can neither be taken over nor take over another one."""
    if not state._can_be_taken_over:
        raise StateError(
            f"a program with {type(state).__name__} cannot be swapped yet: run the job with checkpoint=, stop it, "
            "and run the new program with the same folder."
        )


def take_over(new: State, old: State, base: Mapping[str, Any], edited: Mapping[str, Any]) -> Taken:
    """Take over the values of `old`, which stays as it is. `base` and `edited`: small values at the beginning of both programs.

    StateError if `new` cannot take over anything.
    """
    check(new)
    tensors = _take_tensors(new, old)
    entries = _take_entries(new, old)
    fresh, own = _take_small(new, old, base, edited)
    notes = _listed("starts fresh with", fresh) + _listed("sets", own)
    notes += _listed("has new parameters", tensors + entries)
    missing = [name for name in old._contents.values if name not in new._contents.values]
    notes += _listed("does not take over", missing)
    rng.set_states(old._record._random)
    new.commits, new._began_at = old.commits, old.commits
    new._record_all()
    return Taken(notes, bool(tensors or entries or fresh or own))


def _large(state: State) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    modules = state._contents.live()["modules"]
    return {f"{name}.{key}": tensor for name, tensors in modules.items() for key, tensor in tensors.items()}


def _take_tensors(new: State, old: State) -> list[str]:
    """Copy parameters and buffers; returns the names of those that begin with fresh values."""
    theirs, fresh = _large(old), []
    with torch.no_grad():
        for name, tensor in _large(new).items():
            source = theirs.get(name)
            if source is None or shape_of(source) != shape_of(tensor):
                fresh.append(name)
            elif source is not tensor:
                tensor.copy_(source)
    return fresh


def _take_entries(new: State, old: State) -> list[str]:
    """Copy what optimizers keep for parameters; returns the names of optimizers that begin without it, though the old one had some."""
    by_name = {name: parameter for parameter, name in old._contents.names.items()}
    fresh = []
    for name, optimizer in new._contents.named(torch.optim.Optimizer).items():
        source = old._contents.values.get(name)
        if source is optimizer or not isinstance(source, torch.optim.Optimizer):
            continue
        if type(source) is not type(optimizer):
            fresh.append(name)
            continue
        for parameter in optimizers.parameters(optimizer):
            before = by_name.get(new._contents.names[parameter])
            if before is not None and before in source.state and shape_of(before) == shape_of(parameter):
                optimizer.state[parameter] = _copied(source.state[before])
        for key, entry in optimizers.shared(source).items():
            optimizer.state[key] = _copied(entry)
    return fresh


def _copied(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {key: _copied(value) for key, value in entry.items()}
    return entry.detach().clone() if isinstance(entry, torch.Tensor) else frozen(entry)


def _take_small(
    new: State, old: State, base: Mapping[str, Any], edited: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Merge counters, options and the like. Returns the names that the new program begins with, and what it sets."""
    present, values, own, fresh = old._small_values(), dict[str, Any](), list[str](), list[str]()
    logs = new._contents.named(StepLog)
    for name, value in edited.items():
        if name not in present or name not in base or type(base[name]) is not type(value):
            fresh.append(name)
        elif name in logs:  # its key is new in each program, and is to stay that of the log
            values[name] = present[name]
        else:
            values[name] = merged(base[name], present[name], value, name, own)
            _begin_with_other_data(name, values, base[name], value)
    new._set_small_values(values)
    return fresh, own


def _begin_with_other_data(name: str, values: dict[str, Any], base: Any, edited: Any) -> None:
    """A position in other data means nothing: a sampler or stream begins a pass through its new data."""
    for data, position in (("samples", "used"), ("names", "positions")):
        if isinstance(edited, dict) and {data, position} <= edited.keys() and base.get(data) != edited[data]:
            values[name][position] = edited[position]


def merged(base: Any, present: Any, edited: Any, name: str = "", own: list[str] | None = None) -> Any:
    """`present`, with the changes that were made from `base` to `edited`. The names of these are added to `own`."""
    own = [] if own is None else own
    if _same(base, edited) or _same(present, edited):
        return present
    if isinstance(base, dict) and isinstance(present, dict) and isinstance(edited, dict):
        added = {key: value for key, value in present.items() if key not in base and key not in edited}
        known = {key: key in base and key in present for key in edited}
        return added | {
            key: merged(base[key], present[key], value, f"{name}.{key}", own) if known[key] else value
            for key, value in edited.items()
        }
    if _are_groups(base) and _are_groups(present) and _are_groups(edited) and len(base) == len(present) == len(edited):
        triples = enumerate(zip(base, present, edited, strict=True))
        return [merged(*triple, f"{name}[{index}]" if len(edited) > 1 else name, own) for index, triple in triples]
    own.append(name)
    return edited


def _are_groups(value: Any) -> bool:
    """Whether these may be the parameter groups of an optimizer."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _same(one: Any, other: Any) -> bool:
    """Whether two plain values are equal, tensors in them included."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and shape_of(one) == shape_of(other) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    equal = one == other
    return equal if isinstance(equal, bool) else bool(getattr(equal, "all", lambda: equal)())


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    first = sorted(names, key=lambda name: len(name) > LONG)[:MOST]  # a key of a callback's state may be a line of text
    return [f"the new program {what} {', '.join(first)}{more}"]
