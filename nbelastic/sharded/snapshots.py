"""The commits that this rank can write as its part of a checkpoint, or begin the next world with."""

from __future__ import annotations

from typing import Any

from nbelastic.sharded.checkpoints import Snapshot
from nbelastic.sharded.holdings import Holdings, full_record, present_record
from nbelastic.sharded.whole_commits import Commit


def snapshot(state: Any) -> Snapshot:
    """The `ShardedState` as it is now."""
    bound, layout = state._bound, state._layout
    shard, commit = bound.shard(), Commit(layout.generation, state.commits)
    record = present_record(state._contents, bound, state._program)
    return Snapshot(commit, shard, full_record(record, bound, shard))


def live_snapshot(state: Any) -> Snapshot | None:
    """The commit that the live tensors alone have. None: there is a copy of it, or they are of no commit any more."""
    bound, live = state._bound, state._live_commit
    if bound is None or live is None or state._holdings.has_own(live):
        return None
    shard = state._outside.at_commit(bound.shard())
    return Snapshot(live, shard, full_record(state._live_record, bound, shard)) if shard is not None else None


def kept_commits(state: Any) -> dict[Commit, Snapshot]:
    """The commits of which this rank has its own shard, made in the generation whose models were bound last."""
    found, live = own_commits(state._holdings), live_snapshot(state)
    return found if live is None else {**found, live.commit: live}


def own_commits(holdings: Holdings) -> dict[Commit, Snapshot]:
    """The commits that this rank has made in the generation whose models were bound last, as far as it holds them."""
    newest = max(holdings.ranks, default=0)
    return {
        held.commit: Snapshot(held.commit, shard, holdings.records[held.commit])
        for held, shard in holdings.shards.items()
        if (held.commit.generation, held.shard) == (newest, holdings.ranks[newest]) and held.commit in holdings.records
    }
