"""What a hung worker that alone is left keeps on disk, for a worker of its host that goes on with it: all that it holds."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import torch

from nbelastic.errors import StateError
from nbelastic.sharded.arena import ShardTensor
from nbelastic.sharded.chunks import Layout
from nbelastic.sharded.holdings import Holdings
from nbelastic.sharded.snapshots import live_snapshot
from nbelastic.sharded.whole_commits import Commit
from nbelastic.state.checkpoint_files import flush, prepare, reason

INDEX = "index"  # the file that is written last: all others are complete


def write_kept(state: Any, folder: Path) -> None:
    """Write what the rank of `state` holds into `folder`, in any thread. Raises OSError and StateError."""
    prepare(folder)
    held = _held(state)
    files = []
    for number, (one, shard) in enumerate(sorted(held.shards.items())):  # one by one: copying a shard takes memory
        _save(folder / f"shard-{number}", [(tuple(name), tensor.cpu().clone()) for name, tensor in shard.items()])
        files.append((one.commit.generation, one.commit.number, one.shard))
    records = [
        (commit.generation, commit.number, {key: value for key, value in record.items() if key != "random"})
        for commit, record in held.records.items()
    ]
    layouts = [
        torch.frombuffer(bytearray(msgspec.msgpack.encode(one)), dtype=torch.uint8) for one in held.layouts.values()
    ]
    found = {"commits": state.commits, "files": files, "records": records, "layouts": layouts, "ranks": held.ranks}
    _save(folder / INDEX, {**found, "recoverable": held.recoverable})


def load_kept(state: Any, folder: Path, commit: int) -> None:
    """Take over what `write_kept` wrote into `folder`. StateError if it is not this commit, or not complete."""
    found = _load(folder / INDEX)
    if found["commits"] != commit:
        raise StateError(f"{folder} has commit {found['commits']} instead of commit {commit}.")
    held = Holdings()
    for table in found["layouts"]:
        layout = msgspec.msgpack.decode(table.numpy().tobytes(), type=Layout)
        held.layouts[layout.generation] = layout
    for generation, number, record in found["records"]:
        held.records[Commit(generation, number)] = record
    for index, (generation, number, rank) in enumerate(found["files"]):
        shard = {ShardTensor(*name): tensor for name, tensor in _load(folder / f"shard-{index}")}
        held.add_copy(Commit(generation, number), rank, shard)
    held.ranks, held.recoverable = found["ranks"], found["recoverable"]
    state._holdings, state.commits = held, commit


def _held(state: Any) -> Holdings:
    """What would be held if the generation had ended now."""
    held: Holdings = state._holdings.copy()
    replication, live = state._replication, live_snapshot(state)
    if replication is not None:
        held.add_copies(replication.arrived(), replication.held_on_host())
    if live is not None:
        held.add_own(*live)
    return held


def _save(path: Path, value: Any) -> None:
    torch.save(value, path)
    flush(path)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise StateError(f"the state that a hung worker kept cannot be read from {path}: {reason(error)}.") from None
