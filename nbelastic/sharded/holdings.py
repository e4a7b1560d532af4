"""What a rank holds between generations: shards of commits, its own and copies of others, with what describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbelastic.sharded.arena import Shard
from nbelastic.sharded.bound import Bound
from nbelastic.sharded.bound_checks import check_replicated
from nbelastic.sharded.chunks import Layout
from nbelastic.sharded.whole_commits import Choice, Commit, Held, Origin, Statement
from nbelastic.state.checks import frozen_value
from nbelastic.state.contents import Contents
from nbelastic.state.requires_grad import requires_grad
from nbelastic.state.tensor_snapshot import clone_tensors

Record = dict[str, Any]  # see `present_record` and `full_record`


def present_record(contents: Contents, bound: Bound, program: Record) -> Record:
    """What a step or a forward pass changes beside the sharded tensors: small values, buffers, options of optimizers.

    `program`: what a later program needs to take over the commit, see `takeover.program_record`.
    """
    bound.check_unchanged()
    small = contents.small()
    for name, value in small.items():
        check_replicated(name, value)
    return {
        "program": program,
        "small": {name: frozen_value(name, value) for name, value in small.items()},
        "kinds": contents.kinds() | {name: type(one).__name__ for name, one in bound.optimizers.items()},
        "buffers": clone_tensors(bound.buffers()),
        "extra": bound.extra.copy(),
        "requires_grad": requires_grad(bound.parameters),
        "optimizers": bound.settings(),
    }


def full_record(record: Record, bound: Bound, shard: Shard) -> Record:
    """All that belongs to a commit beside the shards."""
    return {**record, "scalars": bound.scalars(), "tensors": [tuple(name) for name in shard]}


class Holdings:
    """`shards`: what is held. `records`: the small values of commits that this rank made or received."""

    def __init__(self) -> None:
        self.shards: dict[Held, Shard] = {}
        self.records: dict[Commit, Record] = {}
        self.layouts: dict[int, Layout] = {}  # by generation
        self.ranks: dict[int, int] = {}  # by generation, this worker's rank in it
        self.recoverable = False  # there has been a commit to return to, so beginning anew would lose work

    def add_generation(self, layout: Layout, rank: int) -> None:
        self.layouts[layout.generation], self.ranks[layout.generation] = layout, rank

    def add_own(self, commit: Commit, shard: Shard, record: Record) -> None:
        """Keep the shard that this rank has of a commit that it made."""
        self.shards[Held(commit, self.ranks[commit.generation])] = shard
        self.records[commit] = record

    def add_copy(self, commit: Commit, rank: int, shard: Shard) -> None:
        """A copy of the shard of another rank."""
        self.shards[Held(commit, rank)] = shard

    def add_copies(self, sent: tuple[Commit, Mapping[int, Shard]] | None, on_host: Mapping[Held, Shard]) -> None:
        """Copies that other ranks have sent of one commit, and those in the memory of this host."""
        if sent is not None:
            for rank, shard in sent[1].items():
                self.add_copy(sent[0], rank, shard)
        for held, shard in on_host.items():
            self.shards.setdefault(held, shard)

    def of_commit(self, choice: Choice, rank: int) -> dict[int, Shard]:
        """What this rank, `rank` in the new generation, holds of the commit that was chosen: by rank of the old generation."""
        holders = choice.holders
        return {shard: self.shards[Held(choice.commit, shard)] for shard in holders if rank in holders[shard]}

    def copy(self) -> Holdings:
        """The same shards and records; what is added to the copy is not added here."""
        found = Holdings()
        found.shards, found.records = dict(self.shards), dict(self.records)
        found.layouts, found.ranks, found.recoverable = dict(self.layouts), dict(self.ranks), self.recoverable
        return found

    def keep(self, *commits: Commit) -> None:
        """Drop all other commits, as the job can return to one of these, or to the live tensors; and layouts of older generations."""
        self.recoverable = True
        self.shards = {held: shard for held, shard in self.shards.items() if held.commit in commits}
        self.records = {commit: record for commit, record in self.records.items() if commit in commits}
        generations = {*(commit.generation for commit in commits), max(self.layouts, default=0)}
        self.layouts = {number: layout for number, layout in self.layouts.items() if number in generations}
        self.ranks = {number: rank for number, rank in self.ranks.items() if number in generations}

    def has_own(self, commit: Commit) -> bool:
        """Whether this rank holds its own shard of a commit that it made."""
        return Held(commit, self.ranks[commit.generation]) in self.shards

    def keep_record(self, commit: Commit, record: Record) -> None:
        """Drop all commits: the job can return to the live tensors alone. The record names the commit if they are lost."""
        self.keep()
        self.records[commit] = record

    def before(self, commit: Commit) -> list[Commit]:
        """The newest commit that is held and older than this one, if there is one."""
        older = [held.commit for held in self.shards if held.commit < commit]
        return [max(older)] if older else []

    def statement(self) -> Statement:
        """What this rank reports to the other ranks of a new generation."""
        used = {commit.generation for commit in (*(held.commit for held in self.shards), *self.records)}
        origins = {number: Origin(self.layouts[number].hosts, self.layouts[number].owners()) for number in used}
        ranks = {number: self.ranks[number] for number in used if number in self.ranks}
        return Statement(tuple(sorted(self.shards)), origins, ranks, self.recoverable, tuple(sorted(self.records)))
