"""The ranks of a new generation agree on the commit that they return to, and share what describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch.utils._pytree import tree_map_only

from nbelastic.errors import StateError
from nbelastic.sharded.chunks import Layout
from nbelastic.sharded.holdings import Holdings
from nbelastic.sharded.transfer import gather_bytes
from nbelastic.sharded.whole_commits import Choice, Commit, Lost, Statement, choose, is_endangered
from nbelastic.worker.session import Session

ENDANGERED = (
    "a worker was lost while the new program was tried, and a part of the old program's state is left on one worker at most: "
    "the old program goes on first. Then swap once more."
)


def agree_on_commit(
    holdings: Holdings, aside: Holdings | None, session: Session, group: Any
) -> tuple[Choice | Lost | None, list[Statement]]:
    """Collective: the decision of `choose`, and the statements of all ranks. `aside`: for the old program, during a trial.

    StateError, which ends the trial, if one more loss might leave the old program without its state.
    """
    statement = holdings.statement()
    if aside is not None:
        statement = replace(statement, aside=aside.statement())
    own = msgspec.msgpack.encode(statement)
    tables = session.run_abortable(lambda: gather_bytes(own, group))
    statements = [msgspec.msgpack.decode(one, type=Statement) for one in tables]
    if aside is not None and is_endangered([one.aside or Statement() for one in statements]):
        raise StateError(ENDANGERED)
    return choose(statements), statements


def commit_message(holdings: Holdings, commit: Commit) -> dict[str, Any]:
    """For ranks that did not make this commit: its record, and how its shards were split."""
    table = msgspec.msgpack.encode(holdings.layouts[commit.generation])
    record = {key: value for key, value in holdings.records[commit].items() if key != "random"}
    record = tree_map_only(torch.Tensor, torch.Tensor.cpu, record)  # the receivers have other GPUs
    return {**record, "layout": torch.frombuffer(bytearray(table), dtype=torch.uint8)}


def keep_message(holdings: Holdings, commit: Commit, message: Mapping[str, Any]) -> None:
    """The inverse of `commit_message`, on a rank that did not make the commit."""
    table = message["layout"].numpy().tobytes()
    holdings.layouts[commit.generation] = msgspec.msgpack.decode(table, type=Layout)
    holdings.records[commit] = dict(message)
