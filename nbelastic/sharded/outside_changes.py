"""Parameters that a program changes between a commit and the next step, as an average that moves at the top of the loop.

Only the live tensors have a commit that is not copied. After such a change they do not have it any more, and recovery
must not make the change twice. Neither autograd's counts nor hooks show all changes (`.data`), so samples are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from nbelastic.sharded.arena import Shard
from nbelastic.sharded.parameters import local_tensor
from nbelastic.state.tensor_snapshot import versions

SAMPLE = 64  # elements of each parameter
LOOKS = 10  # steps before which samples are compared: that takes longer than to compare counts
OUTSIDE = (
    "{name} changes between a commit and the next step: from now on, commits that are not copied have a copy of it. "
    "Change it between optimizer.step() and state.commit() to save that."
)
Count = tuple[list[int] | None, int]  # of changes, as far as they are counted; and where the values are


class Noted(NamedTuple):
    """What all parameters had at a commit, by their order. `samples`: bytes, for each device."""

    counts: list[Count]
    samples: list[torch.Tensor]


class OutsideChanges:
    """Of `parameters` by name. `moving`: names of those that have changed so; from then on each noted commit copies them."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], moving: Collection[str] = ()) -> None:
        self.moving = {*moving}
        self._parameters = parameters
        self._looks = LOOKS
        self._places: list[int] = []  # of the values in memory that `_views` reads
        self._views: dict[torch.device, dict[str, torch.Tensor]] = {}
        self._noted: Noted | None = None
        self._copies: dict[str, torch.Tensor] = {}

    def note(self) -> None:
        """The present values are those of a commit that nothing copies."""
        counts = self._counts()
        places = [place for _, place in counts]
        if places != self._places:
            self._places, self._views = places, {}
            for name, one in self._parameters.items():
                view = _sample(one)
                self._views.setdefault(view.device, {})[name] = view
        self._noted = Noted(counts, self._samples())
        self._copies = {
            name: local_tensor(self._parameters[name]).clone() for name in self.moving & self._parameters.keys()
        }

    def clear(self) -> None:
        """The last commit is over, or copied."""
        self._noted, self._copies = None, {}

    def find(self) -> str | None:
        """Before a step: look for changes. Returns a line about the first one."""
        new = self._changed(reads=self._looks > 0) - self.moving
        self._looks -= self._noted is not None
        is_first = bool(new) and not self.moving
        self.moving |= new
        return OUTSIDE.format(name=min(new)) if is_first else None

    def at_commit(self, shard: Shard) -> Shard | None:
        """The live `shard` with the values of the commit; None: they are not known any more."""
        unknown = self._changed(reads=True) - self._copies.keys()
        self.moving |= unknown
        if unknown:
            return None
        return {
            one: tensor if one.optimizer else self._copies.get(one.parameter, tensor) for one, tensor in shard.items()
        }

    def _changed(self, *, reads: bool) -> set[str]:
        """The names of parameters that have changed since the noted commit. `reads`: also those whose samples differ."""
        if self._noted is None:
            return set()
        pairs = zip(self._parameters, self._counts(), self._noted.counts, strict=True)
        changed = {name for name, now, then in pairs if now != then}
        if reads:
            for views, now, then in zip(self._views.values(), self._samples(), self._noted.samples, strict=True):
                if not torch.equal(now, then):
                    sizes = [view.numel() for view in views.values()]
                    parts = zip(views, now.split(sizes), then.split(sizes), strict=True)
                    changed |= {name for name, one, other in parts if not torch.equal(one, other)}
        return changed

    def _samples(self) -> list[torch.Tensor]:
        return [torch.cat([*views.values()]) for views in self._views.values()]

    def _counts(self) -> list[Count]:
        found = []
        for parameter in self._parameters.values():
            local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            found.append((versions((parameter, local)), local.data_ptr()))
        return found


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """The bytes of some elements, in the parameter's own memory: NaN differs from itself. Of one with gaps in memory none.

    Nor of one that is conjugated or negated as it is read.
    """
    local = local_tensor(parameter)
    dense = local.permute(sorted(range(local.dim()), key=local.stride, reverse=True))
    if not dense.is_contiguous() or dense.is_conj() or dense.is_neg():
        return torch.empty(0, dtype=torch.uint8, device=local.device)
    flat = dense.view(-1)
    start = max(0, (flat.numel() - SAMPLE) // 2)
    return flat[start : start + SAMPLE].view(torch.uint8)
