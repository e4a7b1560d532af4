"""The state of a new program takes over the values of the old one's, by name.

Parameters, buffers and what optimizers keep for them are taken wherever name and shape are the same. Small values (counters,
options of optimizers, schedulers) are merged as in a three-way merge: what the user has edited counts, all else goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isnan
from typing import Any, NamedTuple

import torch

from nbelastic.errors import StateError
from nbelastic.state import optimizers, rng
from nbelastic.state.optimizers import frozen, grown, regroup
from nbelastic.state.state import State
from nbelastic.state.step_log import StepLog
from nbelastic.state.transfer import shape_of
from nbelastic.state.user_words import UserWords, in_users_words

REQUIRES_GRAD = "requires_grad"  # in notes
MOST = 4  # names in one note
LONG = 40  # characters; longer names come last


class Taken(NamedTuple):
    """What the user should know, and whether some values are those that each rank has made by itself."""

    notes: list[str]
    may_be_unequal: bool


class Initial(NamedTuple):
    """What a program begins with: the base of a later merge."""

    small: dict[str, Any]
    requires_grad: dict[str, bool]


def initial_values(state: State) -> Initial:
    """As the program has just made the state."""
    return Initial(state._small_values(), state._contents.requires_grad())


def take_over(new: State, old: State, base: Initial, edited: Initial) -> Taken:
    """Take over the values of `old`, which stays as it is. `base` and `edited`: values at the beginning of both programs.

    A sharded state does the rest in its next world: see `sharded.takeover`. StateError if the other state is not sharded.
    """
    _check_kinds(new, old)
    if new._is_sharded:
        sharded: Any = new
        sharded._follow(old)
        return Taken([], may_be_unequal=False)
    tensors = _take_tensors(new, old)
    small = merge(old._small_values(), base.small, edited.small, new._contents.named(StepLog))
    _take_groups(new, old, small)
    entries = _take_entries(new, old)
    new._set_small_values(small.values)
    new._contents.extra.set(old._contents.extra.live())
    present = old._contents.requires_grad()
    trained = merged(base.requires_grad, present, edited.requires_grad, REQUIRES_GRAD, small.own)
    new._contents.set_requires_grad(trained)
    missing = [name for name in old._contents.values if name not in new._contents.values]
    rng.set_states(old._record._random)
    new.commits, new._began_at = old.commits, old.commits
    new._record_all()
    unequal = bool(tensors or entries or small.fresh or small.own)
    return Taken(describe_taken(small, tensors + entries, missing, new._contents.user_words), unequal)


def describe_taken(small: Merged, parameters: list[str], missing: list[str], words: UserWords) -> list[str]:
    """What the user should know. `parameters`: names of those that are new, `missing`: of values that no state has any more."""
    fresh, own, lacking = (in_users_words(names, words) for names in (small.fresh, small.own, missing))
    notes = listed("starts fresh with", fresh) + listed("sets", own)
    return notes + listed("has new parameters", parameters) + listed("does not take over", lacking)


def _check_kinds(new: State, old: State) -> None:
    if new._is_sharded != old._is_sharded:
        raise StateError(
            f"the state of the new program is a {type(new).__name__}, and that of the old one a {type(old).__name__}, which keeps "
            f"its tensors in another way: use a {type(old).__name__}, or stop the job and run the new program as a new job."
        )


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


def _take_groups(new: State, old: State, small: Merged) -> None:
    """Add the parameter groups that optimizers got during the training, as far as the merge has them."""
    for name, optimizer in new._contents.named(torch.optim.Optimizer).items():
        source, groups = old._contents.values.get(name), small.values.get(name, [])
        if isinstance(source, torch.optim.Optimizer) and len(groups) > len(optimizer.param_groups):
            own, theirs = (
                [[state._contents.names[one] for one in group["params"]] for group in of.param_groups]
                for state, of in ((new, optimizer), (old, source))
            )
            wanted = grown(own, theirs, new._contents.names.values())
            small.values[name] = groups[: len(wanted)]
            regroup(optimizer, {"names": wanted, "groups": small.values[name]}, new._contents.names)


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


class Merged(NamedTuple):
    """`values`: those that are taken over. `own`: names of what the new program sets. `fresh`: of values that begin as it makes them."""

    values: dict[str, Any]
    own: list[str]
    fresh: list[str]


def merge(
    present: Mapping[str, Any], base: Mapping[str, Any], edited: Mapping[str, Any], logs: Collection[str] = ()
) -> Merged:
    """Merge counters, options and the like. `logs`: the names of step logs."""
    found = Merged({}, [], [])
    for name, value in edited.items():
        if name not in present or name not in base or type(base[name]) is not type(value):
            found.fresh.append(name)
        elif name in logs:  # its key is new in each program, and is to stay that of the log
            found.values[name] = present[name]
        else:
            found.values[name] = merged(base[name], present[name], value, name, found.own)
            _begin_with_other_data(name, found.values, base[name], value)
    return found


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
        added = {key: value for key, value in present.items() if key not in base}
        known = {key: key in base and key in present for key in edited}
        return added | {
            key: merged(base[key], present[key], value, f"{name}.{key}", own) if known[key] else value
            for key, value in edited.items()
        }
    if all(map(_are_groups, (base, present, edited))) and len(base) == len(edited) <= len(present):
        triples = enumerate(zip(base, present, edited, strict=False))
        found = [merged(*triple, f"{name}[{index}]" if len(edited) > 1 else name, own) for index, triple in triples]
        return found + present[len(edited) :]
    own.append(name)
    return edited


def _are_groups(value: Any) -> bool:
    """Whether these may be the parameter groups of an optimizer."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _same(one: Any, other: Any) -> bool:
    """Whether two plain values are equal, tensors in them included."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return shape_of(one) == shape_of(other) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isnan(one):
        return isnan(other)
    equal = one == other
    return equal if isinstance(equal, bool) else bool(getattr(equal, "all", lambda: equal)())


def listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    first = sorted(names, key=lambda name: len(name) > LONG)[:MOST]  # a key of a callback's state may be a line of text
    return [f"the new program {what} {', '.join(first)}{more}"]
