"""A new program takes over a commit of the old one: parameters, buffers and what optimizers keep for them, by name.

The record of each commit says which program made it, and what that program began with. So a commit of another program than
the present one is taken over, in whichever generation it is restored and whichever ranks are there. Small values are merged
as in `state.takeover`. Nothing that the old program holds is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from nbelastic.sharded.arena import ShardTensor
from nbelastic.sharded.bound import Bound
from nbelastic.sharded.chunks import Layout
from nbelastic.sharded.holdings import Record
from nbelastic.state.optimizers import grown
from nbelastic.state.requires_grad import requires_grad
from nbelastic.state.takeover import REQUIRES_GRAD, describe_taken, merge, merged
from nbelastic.state.user_words import UserWords


class Taken(NamedTuple):
    """A commit of an earlier program as one of the present program, and what the user should know."""

    record: Record
    notes: list[str]


def program_record(number: int, small: Mapping[str, Any], bound: Bound) -> Record:
    """What a later program needs to take over from this one. `small`: the small values that this program begins with."""
    options = {name: one["groups"] for name, one in bound.settings().items()}
    kinds = {name: f"{type(one).__module__}.{type(one).__qualname__}" for name, one in bound.optimizers.items()}
    initial = {**small, **options}
    return {"number": number, "initial": initial, "kinds": kinds, "requires_grad": requires_grad(bound.parameters)}


def is_taken_over(record: Record, program: int) -> bool:
    """Whether another program than `program` made the commit of this record."""
    return bool(record["program"]["number"] != program)


def merged_small(record: Record, program: int, edited: Mapping[str, Any], logs: Collection[str]) -> dict[str, Any]:
    """The small values with which `program`, which begins with `edited`, goes on from this record of another one's commit.

    No values if it is a commit of its own.
    """
    if not is_taken_over(record, program):
        return {}
    return {**edited, **merge(record["small"], record["program"]["initial"], edited, logs).values}


def common_parameters(old: Layout, new: Layout) -> set[str]:
    """The parameters of the same name, shape and type."""

    def kind(layout: Layout, name: str) -> tuple[Any, ...]:
        return layout.parameters[name].shape, layout.parameters[name].dtype

    return {name for name in new.parameters.keys() & old.parameters.keys() if kind(old, name) == kind(new, name)}


def new_buffers(bound: Bound, record: Record) -> set[str]:
    """The names of buffers that the commit has not, or with another shape or type."""
    return {
        f"{name}.{key}"
        for name, buffers in bound.buffers().items()
        for key, buffer in buffers.items()
        if not _fits(buffer, record["buffers"].get(name, {}).get(key))
    }


def _fits(buffer: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and (buffer.shape, buffer.dtype) == (other.shape, other.dtype)


def taken_record(record: Record, bound: Bound, program: Record, common: Collection[str], words: UserWords) -> Taken:
    """The record that fills `bound` with what it has in `common` with the commit of `record`.

    `program` is the record of the present program, `words` its `Contents.user_words`.
    """
    theirs, settings, buffers = record["program"], bound.settings(), bound.buffers()
    for name, one in settings.items():
        one["names"] = grown(one["names"], record["optimizers"].get(name, one)["names"], bound.parameters)
    same = {name for name, kind in program["kinds"].items() if theirs["kinds"].get(name) == kind}
    trained = {name: {key for group in settings[name]["names"] for key in group} & {*common} for name in same}
    present = {**record["small"], **{name: one["groups"] for name, one in record["optimizers"].items()}}
    small = merge(present, theirs["initial"], program["initial"])
    tensors = [ShardTensor(*name) for name in record["tensors"]]
    fresh = new_buffers(bound, record)
    base, present, edited = (one.get("requires_grad", {}) for one in (theirs, record, program))
    taken = {
        "requires_grad": merged(base, present, edited, REQUIRES_GRAD, small.own),
        "small": {name: value for name, value in small.values.items() if name not in settings},
        "optimizers": {
            name: {"groups": groups[: len(one["names"])], "names": one["names"][: len(groups)]}
            for name, one in settings.items()
            for groups in [small.values.get(name, one["groups"])]
        },
        "scalars": {
            name: {key: one for key, one in record["scalars"].get(name, {}).items() if key in trained.get(name, ())}
            for name in settings
        },
        "tensors": [
            tuple(one)
            for one in tensors
            if one.parameter in (trained.get(one.optimizer, ()) if one.optimizer else common)
        ],
        "extra": record.get("extra", {}),
        "buffers": {
            name: {
                key: buffer.clone() if f"{name}.{key}" in fresh else record["buffers"][name][key]
                for key, buffer in own.items()
            }
            for name, own in buffers.items()
        },
    }
    parameters = sorted(bound.parameters.keys() - common) + sorted(fresh)
    optimizers = [name for name in settings if name in theirs["kinds"] and name not in same]
    had = {*theirs["initial"], *record["buffers"]}
    missing = sorted(had - {*program["initial"], *buffers})
    return Taken(taken, describe_taken(small, parameters + optimizers, missing, words))
