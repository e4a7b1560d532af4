"""A Hugging Face Trainer whose model FSDP2 shards anew in each world."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from accelerate.state import AcceleratorState, DistributedType, PartialState
from transformers import Trainer

from nbelastic.errors import NoWorldError
from nbelastic.integrations.accelerate import Accelerator
from nbelastic.integrations.accelerate_sharding import unchanged_environment
from nbelastic.integrations.unsharded import Unsharded
from nbelastic.sharded.state import ShardedState
from nbelastic.worker import session


def allow_fsdp() -> None:
    """A Trainer refuses `fsdp` in a single process. In a worker it is one until there is a world, so let it pass."""
    make = Trainer.__init__

    @functools.wraps(make)
    def make_trainer(trainer: Any, *values: Any, **options: Any) -> None:
        arguments = options.get("args", values[1] if len(values) > 1 else None)
        with (
            _as_distributed(arguments) if getattr(arguments, "fsdp", None) and _is_worker() else unchanged_environment()
        ):
            make(trainer, *values, **options)

    Trainer.__init__ = make_trainer


@contextmanager
def _as_distributed(arguments: Any) -> Iterator[None]:
    """As in a process group of one rank: the Trainer does not move its model to the GPU then, as it is to be sharded."""
    _ = arguments.device  # makes the states
    AcceleratorState._reset_state()
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    with unchanged_environment():
        yield


def _is_worker() -> bool:
    with suppress(NoWorldError):
        session.current()
        return True
    return False


class Sharding:
    """Of a Trainer with FSDP2. Its model is whole when it is made."""

    def __init__(self, trainer: Any, state: ShardedState) -> None:
        self._trainer, self._state = trainer, state
        self._unsharded = Unsharded(trainer.model)

    def enter(self) -> None:
        """Before the Trainer prepares its model in a new world: the model is whole, or empty if a commit will fill it."""
        self._unsharded.restore(empty=self._state._choice is not None)
        self._trainer.optimizer = None  # the Trainer makes one
        self._trainer.accelerator.__class__ = Accelerator

    def prepared(self) -> None:
        """The Trainer has sharded and bound the model."""
        self._unsharded.sharded()

    def committed(self) -> None:
        if self._state._holdings.recoverable:
            self._unsharded.forget_values()

    def leave(self) -> None:
        """The world was aborted or left: the sharded parameters would keep its process group."""
        self._unsharded.restore(empty=True)
        self._trainer.optimizer = None
