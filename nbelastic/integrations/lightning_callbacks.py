"""Lightning's callbacks that need more than their `state_dict()`: averages of the module, and those that are refused."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy

from nbelastic.errors import UsageError

FINDER = (
    "{name} trains before there is a world: run it in a program of its own, without fit(), and write its result here."
)


def check_callbacks(trainer: Any) -> None:
    """UsageError for a callback that cannot be elastic."""
    is_sharded = isinstance(trainer.strategy, ModelParallelStrategy)
    for one in trainer.callbacks:
        name = type(one).__name__
        if isinstance(one, (BatchSizeFinder, LearningRateFinder)):
            raise UsageError(FINDER.format(name=name))
        if isinstance(one, StochasticWeightAveraging):
            raise UsageError(
                f"{name} makes a scheduler of its own in the middle, which a newcomer would not have: use Lightning's "
                "WeightAveraging."
            )
        if isinstance(one, WeightAveraging) and is_sharded:
            raise UsageError(f"{name} keeps a whole copy of the module, and this module is sharded: leave it out.")


class Averages:
    """The averages that `WeightAveraging` callbacks keep of the module: values of the state.

    In a validation the callback exchanges the values of the module and of its average. It writes to `data`, which no commit
    notices. So the exchange is undone if a loss ends the validation.
    """

    def __init__(self, trainer: Any) -> None:
        self._module = trainer.lightning_module
        self._callbacks = averaging(trainer)
        self._exchanged: set[Any] = set()

    def values(self) -> dict[str, Any]:
        return {f"average_{i}": one._average_model for i, one in enumerate(self._callbacks)}

    @contextmanager
    def watched(self) -> Iterator[None]:
        for one in self._callbacks:
            one._swap_models = functools.partial(self._swap, one)
        try:
            yield
        finally:
            for one in self._callbacks:
                del one._swap_models

    def leave(self) -> None:
        """The world is left."""
        for one in [*self._exchanged]:
            self._swap(one, self._module)

    def _swap(self, callback: Any, module: Any) -> None:
        type(callback)._swap_models(callback, module)
        self._exchanged ^= {callback}


def averaging(trainer: Any) -> list[Any]:
    return [one for one in trainer.callbacks if isinstance(one, WeightAveraging)]
