"""Parameters that a program changes between a commit and the next step, as an average that moves at the top of the loop.

Only the live tensors have a commit that is not copied. After such a change they do not have it any more, and recovery
must not make the change twice. Neither autograd's counts nor hooks show all changes (`.data`), so samples are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from nbelastic.sharded.arena import Shard
from nbelastic.sharded.parameters import local_tensor
from nbelastic.state.tensor_snapshot import versions

SAMPLES = 1024  # elements
OUTSIDE = (
    "{name} changes between a commit and the next step: from now on, commits that are not copied have a copy of it. "
    "Change it between optimizer.step() and state.commit() to save that."
)


class Mark(NamedTuple):
    """How often a parameter was changed, as far as it is counted, and some of its bytes."""

    version: list[int] | None
    sample: torch.Tensor


class OutsideChanges:
    """Of `parameters` by name. `moving`: names of those that have changed so; from then on each noted commit copies them."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], moving: Collection[str] = ()) -> None:
        self.moving = {*moving}
        self._parameters = parameters
        self._marks: dict[str, Mark] = {}
        self._copies: dict[str, torch.Tensor] = {}

    def note(self) -> None:
        """The present values are those of a commit that nothing copies."""
        self._marks = {name: _mark(one) for name, one in self._parameters.items()}
        self._copies = {
            name: local_tensor(self._parameters[name]).clone() for name in self.moving & self._parameters.keys()
        }

    def clear(self) -> None:
        """The last commit is over, or copied."""
        self._marks, self._copies = {}, {}

    def find(self) -> str | None:
        """Before a step: look for changes. Returns a line about the first one."""
        new = self._changed() - self.moving
        is_first = bool(new) and not self.moving
        self.moving |= new
        return OUTSIDE.format(name=min(new)) if is_first else None

    def at_commit(self, shard: Shard) -> Shard | None:
        """The live `shard` with the values of the commit; None: they are not known any more."""
        if self._changed() - self._copies.keys():
            return None
        return {
            one: tensor if one.optimizer else self._copies.get(one.parameter, tensor) for one, tensor in shard.items()
        }

    def _changed(self) -> set[str]:
        return {name for name, mark in self._marks.items() if not _equal(mark, _mark(self._parameters[name]))}


def _mark(parameter: torch.Tensor) -> Mark:
    flat = local_tensor(parameter).reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLES)].clone()
    return Mark(versions([parameter]), sample.view(torch.uint8))  # as bytes: NaN differs from itself


def _equal(one: Mark, other: Mark) -> bool:
    return one.version == other.version and torch.equal(one.sample, other.sample)
