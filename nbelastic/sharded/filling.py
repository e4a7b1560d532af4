"""The bound models and optimizers of a generation get their values: first ones, or those of a commit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from nbelastic.errors import UsageError
from nbelastic.sharded.arena import ShardTensor
from nbelastic.sharded.bound import Bound, agree_on_layout
from nbelastic.sharded.chunks import Layout, only
from nbelastic.sharded.holdings import Holdings, Record
from nbelastic.sharded.initial_values import allocate, set_first_values
from nbelastic.sharded.refill import check_fits, equalize, refill, run_in_order
from nbelastic.sharded.resharding import moves
from nbelastic.sharded.takeover import Taken, common_parameters, is_taken_over, new_buffers, taken_record
from nbelastic.sharded.whole_commits import Choice
from nbelastic.state.user_words import UserWords
from nbelastic.worker import ranks
from nbelastic.worker.formation import Formation
from nbelastic.worker.session import Session


class Filling:
    """All methods are collective. `allocated`: the tensors of each model that have memory but no values yet."""

    def __init__(
        self,
        session: Session,
        group: Any,
        bound: Bound,
        layout: Layout,
        rank: int,
        *,
        allocated: Mapping[str, set[torch.Tensor]],
        init: Callable[[Any], object] | None,
    ) -> None:
        self.layout = layout
        self._session, self._group, self._bound, self._rank = session, group, bound, rank
        self._allocated, self._init = allocated, init

    def first_values(self) -> None:
        """Give models that were made on the meta device their first values."""
        set_first_values(self._bound, self._allocated, self._init, self._session.run_abortable, self._group)

    def begin(self) -> None:
        """Give all models their first values, the same on ranks that hold the same chunk."""
        self.first_values()
        self._equalize(self.layout)

    def restore(self, choice: Choice, held: Holdings, program: Record, words: UserWords) -> Taken:
        """Set the values of a commit; returns its small values. `program`: the record of the present program, `words`: its user's.

        StateError if the program has made the commit with other models. A commit of an earlier program is taken over.
        """
        record, old = held.records[choice.commit], held.layouts[choice.commit.generation]
        if is_taken_over(record, program["number"]):
            return self._take_over(choice, held, program, words)
        check_fits(old, self.layout, self._bound, record)
        self._fill(choice, held, old, record, is_part=False)
        return Taken(record, [])

    def _take_over(self, choice: Choice, held: Holdings, program: Record, words: UserWords) -> Taken:
        """Set the values of a commit by name; what is new begins as the program makes it."""
        record, old = held.records[choice.commit], held.layouts[choice.commit.generation]
        common = common_parameters(old, self.layout)
        fresh = self.layout.parameters.keys() - common
        if fresh or new_buffers(self._bound, record):
            self._allocated = self._not_taken(common, record)
            self.first_values()
            self._equalize(only(self.layout, fresh))
        taken = taken_record(record, self._bound, program, common, words)
        self._fill(choice, held, only(old, common), taken.record, is_part=True)
        return taken

    def _not_taken(self, common: Collection[str], record: Record) -> dict[str, set[torch.Tensor]]:
        """The tensors without values that the commit has not either."""
        bound = self._bound
        taken: set[torch.Tensor] = {bound.parameters[name] for name in common}
        fresh = new_buffers(bound, record)
        for name, buffers in bound.live_buffers().items():
            taken |= {buffer for key, buffer in buffers.items() if f"{name}.{key}" not in fresh}
        return {name: tensors - taken for name, tensors in self._allocated.items()}

    def _equalize(self, layout: Layout) -> None:
        bound, rank, group = self._bound, self._rank, self._group
        run_in_order(self._session, bound.device, lambda: equalize(bound, layout, rank, group))

    def _fill(self, choice: Choice, held: Holdings, old: Layout, record: Record, *, is_part: bool) -> None:
        """Move the tensors that `record` names from the chunks of `old` into the bound ones, and set all other values."""
        bound, rank = self._bound, self._rank
        names, own = [ShardTensor(*name) for name in record["tensors"]], held.of_commit(choice, rank)
        plan = list(moves(old, only(self.layout, old.parameters), choice.holders, rank))
        fill = partial(refill, bound, names, plan, own, rank=rank, group=self._group)
        filled = run_in_order(self._session, bound.device, fill)
        bound.set_record(record, filled, is_part=is_part)


def prepare(
    bound: Bound, init: Callable[[Any], object] | None, formation: Formation, session: Session, group: Any
) -> Filling:
    """Collective: allocate what has no memory yet, and agree on how the parameters are split."""
    if init is not None and not callable(init):
        raise UsageError(f"bind(init={init!r}): a function that gives the model its first values, init(model).")
    allocated = {name: allocate(module, ranks.device()) for name, module in bound.modules.items()}
    layout = agree_on_layout(bound, formation, session, group)
    return Filling(session, group, bound, layout, formation.rank, allocated=allocated, init=init)
