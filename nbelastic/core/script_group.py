"""A script's worker group: its nodes, its rounds, and what can be told from them. Immutable; replaced, never changed."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from nbelastic.core.reasons import Reason
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.limits import NEVER, Limits

CONSEQUENCES = (-15, -2)  # a worker that was told to end says nothing of why


class Stage(StrEnum):
    GATHERING = "gathering"  # who is to be in the next round reports ready
    RUNNING = "running"
    ENDED = "ended"


class GroupState(StrEnum):
    """Of a node's workers, as torch's elastic agent has it."""

    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"


class Node(Struct, frozen=True):
    joined: int  # its seniority
    slots: int
    external: bool = False
    role: str = ""
    state: GroupState = GroupState.INIT
    ready: bool = False  # it waits for a round
    store: str = ""
    starts: int = 1  # in a row that came to nothing, this one included
    retry_at: float = 0.0  # not started before; 0.0: it is started
    pid: int = 0
    pids: tuple[int, ...] = ()


class Group(Struct, frozen=True):
    """A script's job. `assignments` are those of the present or last round, by group rank."""

    job: str
    terms: sev.Terms
    limits: Limits
    stage: Stage = Stage.GATHERING
    round: int = 0
    nodes: dict[str, Node] = {}
    joined: int = 0
    assignments: tuple[sev.Assignment, ...] = ()
    restarts: int = 0
    failures: tuple[tuple[str, sev.Failure, float], ...] = ()  # of this round: on which node, and when (driver's clock)
    judge_at: float = NEVER  # when what failed is judged, whatever is not known by then
    leave_by: float = NEVER  # when nodes that have not left their round are told to end or, told so, count as gone
    end_sent: bool = False  # they were told to end
    since: float = 0.0  # since when there are enough, or a better round could be had
    enough: bool = False
    short_since: float | None = None
    until: float = NEVER
    reason: Reason = Reason("no-hosts")
    outcome: str = ""
    hosts_seen: sev.HostsChanged | None = None  # the last one

    @property
    def size(self) -> int:
        """How many workers the present or last round has."""
        return sum(seat.workers for seat in self.assignments)


def ranks_by_node(assignments: tuple[sev.Assignment, ...]) -> tuple[tuple[int, int, int, int], ...]:
    """Of each node: its first rank, the world size, the first rank within its role, and the role's size."""
    roles: dict[str, int] = {}
    for seat in assignments:
        roles[seat.role] = roles.get(seat.role, 0) + seat.workers
    world = sum(seat.workers for seat in assignments)
    found, rank, in_role = [], 0, dict.fromkeys(roles, 0)
    for seat in assignments:
        found.append((rank, world, in_role[seat.role], roles[seat.role]))
        rank += seat.workers
        in_role[seat.role] += seat.workers
    return tuple(found)


def first_failure(failures: Iterable[tuple[str, sev.Failure, float]]) -> tuple[str, sev.Failure]:
    """The one that explains the others: one killed by a signal before one that raised, and an earlier before a later one."""

    def order(each: tuple[str, sev.Failure, float]) -> tuple[bool, bool, float, int]:
        _, failure, at = each
        return failure.code in CONSEQUENCES, failure.code > 0, at, failure.rank

    host, failure, _ = min(failures, key=order)
    return host, failure
