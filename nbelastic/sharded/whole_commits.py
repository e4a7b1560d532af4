"""Which commit the ranks of a new generation return to: the newest of which every chunk has a holder among them.

Pure: every rank makes the same decision from the same statements.
"""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from nbelastic.protocol.worker_messages import MOST_RANKS, Continued


class Commit(Struct, frozen=True, order=True):
    """A commit of a generation. A later generation continues from the commit that was chosen, so it is the newer one."""

    generation: int
    number: int  # commits since the beginning of the job


class Held(Struct, frozen=True, order=True):
    """A shard that a rank holds: of this commit, of the rank `shard` of that generation."""

    commit: Commit
    shard: int


class Origin(Struct, frozen=True):
    """A generation of which a rank holds shards: its hosts by rank, and which ranks hold equal chunks."""

    hosts: tuple[str, ...]
    owners: tuple[frozenset[int], ...]  # see `Layout.owners`


class Statement(Struct, frozen=True):
    """What one rank holds. `ranks`: by generation, its rank in it. `recoverable`: the job had a commit to return to.

    `known`: the commits of which it has the small values. A newcomer that has filled no shard yet knows the one it was given.
    `aside`: what the rank holds for the old program, while a new one is tried.
    """

    held: tuple[Held, ...] = ()
    origins: dict[int, Origin] = {}
    ranks: dict[int, int] = {}
    recoverable: bool = False
    known: tuple[Commit, ...] = ()
    aside: Statement | None = None


class Choice(Struct, frozen=True):
    """The commit to return to. `holders`: by shard, the ranks of the new generation that hold it, lowest first.

    `members` are the ranks that made the commit and hold their own shard: they also have the small values.
    """

    commit: Commit
    holders: dict[int, tuple[int, ...]]
    members: tuple[int, ...]


class Lost(Struct, frozen=True):
    """No commit is whole: of this one, no rank holds the shards of these ranks of its generation."""

    commit: Commit
    shards: tuple[int, ...]
    hosts: tuple[str, ...]  # of these shards

    def __str__(self) -> str:
        names = ", ".join(f"rank {shard} ({host})" for shard, host in zip(self.shards, self.hosts, strict=True))
        return (
            f"the training state is lost: no worker is left with the shards of {names} of generation "
            f"{self.commit.generation}, nor with copies of them, so commit {self.commit.number} is not whole."
        )


def is_endangered(statements: Sequence[Statement]) -> bool:
    """Whether ranks were lost since the newest commit was made, and one more loss may leave no commit whole. `statements`: by rank."""
    commits = sorted({held.commit for statement in statements for held in statement.held})
    origins = {generation: origin for statement in statements for generation, origin in statement.origins.items()}
    if not commits:
        return False
    newest = commits[-1].generation
    present = {statement.ranks.get(newest) for statement in statements}
    if present.issuperset(range(len(origins[newest].hosts))):
        return False
    enough = min(2, len(statements))

    def has_spare(commit: Commit) -> bool:
        shards = [{held.shard for held in statement.held if held.commit == commit} for statement in statements]
        holders = (sum(not ranks.isdisjoint(own) for own in shards) for ranks in origins[commit.generation].owners)
        return len(_members(statements, commit)) >= enough and all(count >= enough for count in holders)

    return not any(map(has_spare, commits))


def choose(statements: Sequence[Statement]) -> Choice | Lost | None:
    """The newest whole commit; `Lost` if none is whole any more; None if none has been whole yet. `statements`: by rank."""
    found: dict[Commit, dict[int, list[int]]] = {commit: {} for statement in statements for commit in statement.known}
    for rank, statement in enumerate(statements):
        for held in statement.held:
            found.setdefault(held.commit, {}).setdefault(held.shard, []).append(rank)
    origins = {generation: origin for statement in statements for generation, origin in statement.origins.items()}
    for commit in sorted(found, reverse=True):
        shards, members = found[commit], _members(statements, commit)
        if members and all(not ranks.isdisjoint(shards) for ranks in origins[commit.generation].owners):
            holders = {shard: tuple(ranks) for shard, ranks in sorted(shards.items())}
            return Choice(commit, holders, members)
    if not any(statement.recoverable for statement in statements):
        return None
    return min((_lost(commit, origins[commit.generation], found[commit]) for commit in found), key=_damage)


def _lost(commit: Commit, origin: Origin, shards: Mapping[int, object]) -> Lost:
    lost = sorted(min(ranks) for ranks in origin.owners if ranks.isdisjoint(shards))
    return Lost(commit, tuple(lost), tuple(origin.hosts[shard] for shard in lost))


def _damage(lost: Lost) -> tuple[int, int, int]:
    """The commit to report is the newest of those that lack the fewest shards."""
    return len(lost.shards), -lost.commit.generation, -lost.commit.number


def _members(statements: Sequence[Statement], commit: Commit) -> tuple[int, ...]:
    """The ranks that hold their own shard of this commit."""
    return tuple(
        rank
        for rank, statement in enumerate(statements)
        if any(
            held.commit == commit and held.shard == statement.ranks.get(commit.generation) for held in statement.held
        )
    )


def continued(choice: Choice | Lost | None, statements: Sequence[Statement], rank: int) -> Continued | None:
    """For the event log: to which commit the ranks return, and the lost ranks whose shards come from copies. None: to none."""
    if not isinstance(choice, Choice):
        return None
    generation = choice.commit.generation
    origin = next(one.origins[generation] for one in statements if generation in one.origins)
    present = {one.ranks.get(generation) for one in statements}
    lost = sorted(min(ranks) for ranks in origin.owners if ranks.isdisjoint(present))
    return Continued(generation, choice.commit.number, tuple(lost[:MOST_RANKS]), len(statements), rank)
