"""A script's worker group: its nodes and rounds. Immutable; replaced, never changed."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from nbelastic.core.reasons import Reason
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.cluster_limits import NEVER, Limits

CONSEQUENCES = (-15, -2)  # exit codes of workers that were asked to end, which explain nothing
ABORTED = -6  # exit code of a worker that C++ code has aborted (SIGABRT), as after an exception that is not caught


class Stage(StrEnum):
    GATHERING = "gathering"  # nodes report that they are ready for the next round
    RUNNING = "running"
    ENDED = "ended"


class GroupState(StrEnum):
    """The state of a node's workers, with the names of torch's elastic agent."""

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
    since: float = 0.0  # when it was started
    starts: int = 1  # in a row without a round, this one included
    ends: int = 0  # in a row, after it had been ready for a round
    retry_at: float = 0.0  # when it is started again; 0.0: it was started
    why: str = ""  # the one before it has ended
    pid: int = 0
    pids: tuple[int, ...] = ()

    @property
    def has_workers(self) -> bool:
        """Whether it has not left its round."""
        return not self.ready and self.state in (GroupState.HEALTHY, GroupState.UNHEALTHY)


class Group(Struct, frozen=True):
    """The worker group of a script. `assignments` are those of the present or last round, by group rank."""

    job: str
    terms: sev.Terms
    limits: Limits
    stage: Stage = Stage.GATHERING
    round: int = 0
    nodes: dict[str, Node] = {}
    joined: int = 0
    assignments: tuple[sev.Assignment, ...] = ()
    restarts: int = 0
    failures: tuple[tuple[str, sev.Failure, float], ...] = ()  # of this round: node, failure, driver's time
    heard: tuple[str, ...] = ()  # hosts of nodes that are known to have lived after the failures
    judge_at: float = NEVER  # when failures are judged, even if not all nodes have reported
    leave_by: float = NEVER  # when nodes that have not left their round are ended; then, when they count as lost
    end_sent: bool = False  # nodes that have not left their round were asked to end
    since: float = 0.0  # since when `enough`
    enough: bool = False  # nodes are ready for a round or, while one runs, for a better one
    too_few_since: float | None = None
    until: float = NEVER  # when nodes that are starting are no longer waited for
    reason: Reason = Reason("no-hosts")
    outcome: str = ""
    hosts_seen: sev.HostsChanged | None = None  # the newest

    @property
    def size(self) -> int:
        """How many workers the present or last round has."""
        return workers_in(self.assignments)

    def assigns(self, host: str) -> bool:
        """Whether the node of this host is in the present or last round."""
        return any(assignment.host == host for assignment in self.assignments)


def workers_in(assignments: Iterable[sev.Assignment]) -> int:
    return sum(assignment.workers for assignment in assignments)


def ranks_by_node(assignments: tuple[sev.Assignment, ...]) -> tuple[tuple[int, int, int, int], ...]:
    """For each node: its first rank, the world size, its first rank within its role, and the role's size."""
    roles: dict[str, int] = {}
    for assignment in assignments:
        roles[assignment.role] = roles.get(assignment.role, 0) + assignment.workers
    world = workers_in(assignments)
    found, rank, in_role = [], 0, dict.fromkeys(roles, 0)
    for assignment in assignments:
        found.append((rank, world, in_role[assignment.role], roles[assignment.role]))
        rank += assignment.workers
        in_role[assignment.role] += assignment.workers
    return tuple(found)


def was_killed(failure: sev.Failure) -> bool:
    """Whether a signal has ended the worker that no other worker's end leads to. A broken collective may abort its process."""
    return failure.code < 0 and failure.code != ABORTED


def first_failure(failures: Iterable[tuple[str, sev.Failure, float]]) -> tuple[str, sev.Failure]:
    """The failure that explains the others: death by a signal before an exception, then the earlier one."""

    def order(each: tuple[str, sev.Failure, float]) -> tuple[bool, bool, float, int]:
        _, failure, at = each
        return failure.code in CONSEQUENCES, not was_killed(failure), at, failure.rank

    host, failure, _ = min(failures, key=order)
    return host, failure
