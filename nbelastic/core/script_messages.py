"""What is said of a script's nodes: events (past tense) and commands (imperative) of `core.rounds`.

A *node* is an elastic agent of torch's with the workers of its host: one on each host of the cluster while a script runs
(its name is the host's), and each `torchrun` that came from a terminal. A *round* is the life of one worker group.
"""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from msgspec import Struct

from nbelastic.core.messages import Command, Event

UNDONE = 76  # exit code of a node that ends before its workers have succeeded: it was dismissed, or they have failed


class Failure(Struct, frozen=True):
    """How a worker ended. `rank` is of the round; `code` as of `subprocess`: negative is the signal that killed it.

    `error` is one line; `traceback` its own, if it left one. `ago`: how many seconds before it was reported; clocks of
    different hosts are not compared.
    """

    rank: int
    local_rank: int
    code: int
    error: str
    traceback: str = ""
    ago: float = 0.0


class Seat(Struct, frozen=True):
    """A node's part of a round: how many workers it runs, in which role."""

    host: str
    workers: int
    role: str


class NodeReady(Event):
    """It waits for a round, having left `round` (0: none), and offers a store at `store`.

    `workers`: how many it can run, 0: as many as its host has slots. `guest`: it came by itself, from a terminal, for the
    job `job` (empty: whichever runs); its number of workers is fixed.
    """

    host: str
    round: int
    store: str
    role: str
    workers: int = 0
    guest: bool = False
    job: str = ""
    pid: int = 0


class NodeMoved(Event):
    """Its store is to be elsewhere: what it has offered does not count any more."""

    host: str


class NodeStarted(Event):
    """The workers of its round run; `pids` by local rank (none if it cannot know them)."""

    host: str
    round: int
    pids: tuple[int, ...] = ()


class NodeFailed(Event):
    """Workers of its round have failed, and it has ended the others. It will wait for a round, or leave."""

    host: str
    round: int
    failures: tuple[Failure, ...] = ()


class NodeSucceeded(Event):
    """All its workers of this round have ended well."""

    host: str
    round: int


class NodeLeft(Event):
    """It is gone. `broken`: not of its own will."""

    host: str
    reason: str
    broken: bool = False


class HostsSeen(Event):
    """The cluster's hosts that are up, the oldest first, with their slots; and how many workers there may be.

    `lost`: those that are not up because something has happened to them. Who is in neither has left as somebody wanted.
    """

    hosts: tuple[tuple[str, int], ...]
    min: int
    max: int | None
    lost: tuple[str, ...] = ()


class ScriptStopped(Event):
    """Somebody wants it to end."""

    reason: str


class Passed(Event):
    """Time has."""


class StartNode(Command):
    host: str


class EndNode(Command):
    """`error`: it shall end with this as an error; empty: well."""

    host: str
    reason: str
    error: bool = True


class FormRound(Command):
    """`seats` by group rank. `store` is the first one's; `restarts` have been counted so far."""

    round: int
    seats: tuple[Seat, ...]
    store: str
    restarts: int


class LeaveRound(Command):
    """The nodes of `hosts` are to end their workers of `round` and wait for another one."""

    round: int
    hosts: tuple[str, ...]
    reason: str


class EndScript(Command):
    """`seats` of its last round; `failure` the first one, if it failed by one, and the node it was on."""

    outcome: str  # succeeded, failed or stopped
    reason: str
    seats: tuple[Seat, ...] = ()
    failure: Failure | None = None
    host: str = ""
