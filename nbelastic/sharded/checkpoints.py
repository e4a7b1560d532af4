"""The checkpoints of a sharded state: written by all ranks beside the training, and what a job begins or goes on from.

No rank waits for another. Each knows how all parameters are split, copies the chunks that it writes, and a thread writes
them. Ranks that end agree on the commit of their last checkpoint by files, as their process group may be broken.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch.distributed.checkpoint import Metadata

from nbelastic.errors import StateError, UsageError
from nbelastic.protocol.worker_messages import Checkpoint
from nbelastic.sharded import checkpoint_files as files
from nbelastic.sharded.arena import Arena, Shard, ShardTensor
from nbelastic.sharded.checkpoint_names import Names
from nbelastic.sharded.checkpoint_reading import RECORD, Stored, newest
from nbelastic.sharded.chunks import Layout
from nbelastic.sharded.holdings import Record
from nbelastic.sharded.whole_commits import Commit
from nbelastic.state.checkpoint_files import prepare, reason, reserved, still_there
from nbelastic.state.checkpoints import Plan, Saving, as_folder
from nbelastic.state.transfer import check_plain
from nbelastic.system.argument_types import WHOLE, check_kind
from nbelastic.system.log_line import print_line
from nbelastic.worker.interrupts import WorldAborted
from nbelastic.worker.session import Session

PATIENCE = (
    120.0  # seconds without growth after which rank 0 does not wait for the parts of others: caches of NFS last 60
)
HURRY = 10.0  # the same when the generation or the program has ended
NOT_WRITTEN = ("random", "program")  # of this rank, and of the job
AGREE = 10.0  # seconds within which all ranks must come to their end


class Snapshot(NamedTuple):
    """One commit as this rank has it: its own shard, and all values that are not sharded."""

    commit: Commit
    shard: Shard
    record: Record


class State(Protocol):
    """The methods that a job's checkpoints use: see `ShardedState`."""

    commits: int

    def _snapshot(self) -> Snapshot: ...

    def _kept_commits(self) -> dict[Commit, Snapshot]: ...


class Writer:
    """Writes this rank's part of each checkpoint; on rank 0 also what completes it. One checkpoint at a time."""

    def __init__(self) -> None:
        self._saving: Saving | None = None
        self._patience = PATIENCE
        self._memory: Arena | None = None
        self.tokens: list[str] = []  # of all generations: begin the names of their temporary folders
        self._begun = 0  # checkpoints of this generation
        self._failed: list[Path] = []  # temporary folders of checkpoints that rank 0 could not complete
        self._layout: Layout
        self._names: Names
        self._rank = -1  # no model is bound yet

    def follow(self, old: Writer) -> None:
        """Go on after `old`, the writer of the program before: wait for its checkpoint before the next one."""
        old.hurry()
        self._saving = self._saving or old._saving
        self.tokens = [*old.tokens, *self.tokens]

    def enter(self, token: str) -> None:
        """A generation has begun; all its ranks have this `token`."""
        self.tokens.append(f"{files.PARTS}{token}")
        self._begun, self._rank, self._patience = 0, -1, HURRY

    def bound(self, layout: Layout, names: Names, rank: int) -> None:
        """The models are bound."""
        self._layout, self._names, self._rank = layout, names, rank

    @property
    def rank(self) -> int:
        """The rank of this worker in the generation whose models were bound last; -1: none was."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks of that generation."""
        return len(self._layout.hosts)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._saving is not None and not self._saving.done()

    def temporary(self, folder: Path, name: object) -> Path:
        """A temporary folder for all ranks of this generation."""
        return folder / f"{self.tokens[-1]}-{name}"

    def save(
        self,
        folder: Path,
        keep: int,
        take: Callable[[], Snapshot],
        then: Callable[[Path, int], object] = lambda *_: None,
    ) -> Saving:
        """Copy this rank's chunks of `take()`, and begin to write them. Waits for a checkpoint that is being written.

        `then(path, commits)` is called on rank 0 when the checkpoint is complete. All ranks call this equally often.
        """
        self.join()
        self._begun += 1
        self._patience = PATIENCE
        temporary = self.temporary(folder, self._begun)
        try:
            snapshot = take()
            shards = self._shards(snapshot)
        except Exception as error:
            self._failed.append(temporary)
            files.write_failure(temporary, self._rank, error)
            raise
        commits = snapshot.commit.number
        self._saving = Saving(folder, commits)
        if self._rank == 0:
            complete = self._completion(temporary, folder, keep, snapshot, shards)
            self._saving.begin(lambda: _call_with(self._try(complete, temporary), commits, then))
        else:
            self._saving.begin(partial(files.write_part, temporary, self._rank, shards))
        return self._saving

    def _try(self, complete: Callable[[], Path], temporary: Path) -> Path:
        """Complete a checkpoint. The files of one that fails stay until the next one, as other ranks may still write theirs."""
        while self._failed:
            shutil.rmtree(self._failed.pop(), ignore_errors=True)
        self._failed.append(temporary)
        path = complete()
        self._failed.remove(temporary)
        return path

    def _completion(
        self, temporary: Path, folder: Path, keep: int, snapshot: Snapshot, shards: files.Shards
    ) -> Callable[[], Path]:
        """What rank 0 does in a thread: write its part, wait for the others', and complete the checkpoint."""
        layout, names, unfinished = self._layout, self._names, self.tokens[:-1]
        record = {key: value for key, value in snapshot.record.items() if key not in NOT_WRITTEN}
        commits = record["commits"] = snapshot.commit.number

        def complete() -> Path:
            try:
                check_plain([record])  # in a list, as its keys are not names that the user has given
                whole, paths = names.whole_values(record)
            except Exception as error:
                files.write_failure(temporary, 0, error)
                raise
            shards.whole.update(whole, **{RECORD: record})
            folder.mkdir(parents=True, exist_ok=True)
            with reserved(folder) as (_, number):
                files.write_part(temporary, 0, shards)
                parts = files.collect(temporary, len(layout.hosts), lambda: self._patience)
                tensors = [ShardTensor(*one) for one in record["tensors"]]
                metadata, written_as = _metadata(layout, names, tensors, shards.whole, paths)
                path = files.finish(temporary, (folder, commits, number), metadata, written_as, parts)
            files.remove_old(folder, keep, unfinished)
            return still_there(path)

        return complete

    def _shards(self, snapshot: Snapshot) -> files.Shards:
        """A copy of the chunks that this rank writes."""
        chunks = files.chunks_to_write(self._layout.parameters, self._rank)
        live = {one: tensor for one, tensor in snapshot.shard.items() if one.parameter in chunks}
        shapes = [tuple(tensor.shape) for tensor in live.values()]
        held = {one: tuple(tensor.shape) for one, tensor in self._memory.tensors.items()} if self._memory else None
        if self._memory is None or held != dict(zip(live, shapes, strict=True)):
            self._memory = None  # first free the old memory
            on_gpu = any(tensor.is_cuda for tensor in live.values())
            self._memory = Arena(list(live), shapes, pinned=on_gpu)
        self._memory.fill(live, snapshot.commit)
        parameters = self._layout.parameters
        return files.Shards(
            {
                self._names.keys(one)[0]: (tensor, chunks[one.parameter], parameters[one.parameter].shape)
                for one, tensor in self._memory.tensors.items()
            },
            {},
        )

    def hurry(self) -> None:
        """The generation or the program ends: do not wait long for ranks that may have ended."""
        self._patience = HURRY

    def join(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._saving is not None:
            self._saving.join()

    def free(self) -> None:
        """Wait, and free the memory."""
        self.join()
        self._memory = None


def _call_with(path: Path, commits: int, then: Callable[[Path, int], object]) -> Path:
    then(path, commits)
    return path


def _metadata(
    layout: Layout, names: Names, tensors: list[ShardTensor], whole: dict[str, Any], paths: dict[str, tuple[Any, ...]]
) -> tuple[Metadata, dict[str, str]]:
    """What `.metadata` says of all values; and for further keys of one tensor the key under which it is written."""
    described: dict[str, Any] = {}
    written_as = {}
    places = dict(paths)
    for tensor in tensors:
        keys = names.keys(tensor)
        stored = files.sharded_metadata(layout.parameters[tensor.parameter], tensor.dtype)
        for key, path in zip(keys, names.paths(tensor), strict=True):
            described[key], places[key] = stored, path
            written_as[key] = keys[0]
    described.update({key: files.whole_metadata(value) for key, value in whole.items()})
    places[RECORD] = (RECORD,)
    return Metadata(described, planner_data=places), written_as


class ShardedPlan:
    """A job's checkpoints, as `state.checkpoints.Plan`: all ranks write one every `every` commits, and one at the end."""

    def __init__(self, plan: Plan, writer: Writer, session: Session) -> None:
        self.begun, self._plan, self._session, self._writer = plan.begun, plan, session, writer

    def use(self, writer: Writer) -> None:
        """A new program goes on with the job's checkpoints: `writer` is that of its state."""
        if writer is not self._writer:
            writer.follow(self._writer)
            self._writer = writer

    def resume(self, state: State) -> None:
        """Nothing to do: `ShardedState.sync` begins from the newest checkpoint."""

    def newest(self, refused: Mapping[Path, str]) -> Stored | None:
        """The newest complete checkpoint. StateError if there are some, and none can be used. `refused`: see `newest`."""
        stored = newest(self._plan.folder, refused)
        if stored is not None:
            self._plan.found(stored.path, stored.record()["commits"])
        return stored

    def committed(self, state: State) -> None:
        """Called at each commit. The ranks agree on whether all of them are free: if not, this checkpoint is left out."""
        if state.commits % self._plan.every:
            return
        if not self._session.on_any_rank(self._writer.busy):
            self._write(state._snapshot)
        elif self._writer.rank == 0:
            self._plan.warn()

    def ended(self, state: State, turn: int | None) -> None:  # noqa: ARG002  (all ranks write)
        """The elastic function has returned or was stopped: write the newest commit that all ranks have."""
        writer = self._writer
        if writer.rank < 0:
            return
        writer.hurry()
        writer.join()
        kept = state._kept_commits()
        try:
            commit = self._agree(sorted(kept))
        except (OSError, msgspec.MsgspecError, StateError) as error:
            if writer.rank == 0:
                print_line(f"there is no checkpoint of the last commit: {reason(error)}.")
            return
        if commit is not None:
            self._write(lambda: kept[commit])

    def report(self, now: float) -> Checkpoint:
        """As of `Plan`."""
        return self._plan.report(now)

    def finish(self) -> None:
        """The program has ended: wait for the checkpoint that is being written, and free the memory."""
        self._writer.hurry()
        self._writer.free()
        if self._writer.rank == 0:
            with contextlib.suppress(OSError):
                files.remove_old(self._plan.folder, self._plan.keep, self._writer.tokens)

    def _agree(self, commits: list[Commit]) -> Commit | None:
        """The newest commit that all ranks have, if it is newer than the last checkpoint. StateError if some do not come."""
        writer = self._writer
        place = writer.temporary(self._plan.folder, "end")
        place.mkdir(parents=True, exist_ok=True)
        own = place / f"rank-{writer.rank}"
        own.with_suffix(".unfinished").write_bytes(msgspec.json.encode((self._plan.saved, commits)))
        own.with_suffix(".unfinished").rename(own)
        stopped, end = self._is_over(), time.monotonic() + AGREE
        while missing := [rank for rank in range(writer.size) if f"rank-{rank}" not in os.listdir(place)]:
            if time.monotonic() > end:
                raise StateError(f"ranks {missing} did not come to their end within {AGREE:g} s")
            if not stopped and self._is_over():
                raise WorldAborted
            time.sleep(files.POLL)
        found = [(place / f"rank-{rank}").read_bytes() for rank in range(writer.size)]
        ends = [msgspec.json.decode(one, type=tuple[int, list[Commit]]) for one in found]
        common = set.intersection(*(set(theirs) for _, theirs in ends))
        newest = max(common, default=None)
        if newest is None:
            raise StateError("no commit is complete on all ranks")
        return newest if newest.number > ends[0][0] else None

    def _write(self, take: Callable[[], Snapshot]) -> None:
        begin = time.monotonic()
        try:
            self._writer.save(
                self._plan.folder, self._plan.keep, take, lambda path, commits: self._plan.written(path, commits, begin)
            )
        except Exception as error:  # noqa: BLE001  (out of memory, for example)
            print_line(f"there is no checkpoint of this commit: {reason(error)}.")

    def _is_over(self) -> bool:
        """Whether this rank's generation is broken, or the job is."""
        try:
            self._session.check(torch.device("cpu"))
        except WorldAborted:
            return True
        return False


def save(writer: Writer, path: str | Path, keep: int, take: Callable[[], Snapshot]) -> Saving:
    """Begin to write a checkpoint into the folder `path`, on all ranks. StateError if it cannot be written."""
    folder = as_folder(path)
    check_kind("keep", keep, WHOLE)
    if keep < 1:
        raise UsageError(f"keep={keep}: at least 1.")
    prepare(folder)
    return writer.save(folder, keep, take)
