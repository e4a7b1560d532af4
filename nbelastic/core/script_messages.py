"""What is said of a script's nodes: events (past tense) and commands (imperative) of `core.rounds`.

A *node* is an elastic agent of torch's with the workers of its host: one on each host of the cluster while a script runs
(its name is the host's), and each `torchrun` that came from a terminal. A *round* is the life of one worker group.
"""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from msgspec import Struct

from nbelastic.core.limits import Limits
from nbelastic.core.messages import Command, Event
from nbelastic.core.reasons import Reason

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


class Terms(Struct, frozen=True):
    """How a script's workers are started again, beside the cluster's limits. `nproc`: workers a host, instead of its slots."""

    max_restarts: int = 0
    nproc: int | None = None
    leave: float = 35.0  # seconds that a node may take to end its workers


class ScriptSubmitted(Event):
    """Somebody runs a script; or one that has formed `round` rounds begins again, as its driver was lost."""

    job: str
    target: str
    terms: Terms
    round: int = 0


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


class GuestCame(Event):
    """A node has come by itself, from a terminal. `here`: it is on the driver's machine."""

    host: str
    pid: int
    here: bool = False


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
    """The cluster's hosts that are up, the oldest first, with their slots; and its limits.

    `lost`: those that are not up because something has happened to them. Who is in neither has left as somebody wanted.
    """

    hosts: tuple[tuple[str, int], ...]
    limits: Limits
    lost: tuple[str, ...] = ()


class ScriptStopped(Event):
    """Somebody wants it to end."""

    reason: str


class Passed(Event):
    """Time has."""


class ScriptCommand(Command):
    """Something to be done for a script's nodes."""


class StartNode(ScriptCommand):
    host: str


class EndNode(ScriptCommand):
    """`error`: it shall end with this as an error; empty: well."""

    host: str
    reason: str
    error: bool = True


class LetWait(ScriptCommand):
    """A guest is to wait: why, and whether that is because there is no room. No reason: there is no script."""

    host: str
    reason: Reason | None
    full: bool = False


class MoveNode(ScriptCommand):
    """It is to offer its store at `address`, of `interface`."""

    host: str
    address: str
    interface: str = ""


class RepeatRound(ScriptCommand):
    """It is in the present round, and has not heard of that."""

    host: str


class FormRound(ScriptCommand):
    """`seats` by group rank. `store` is the first one's; `restarts` have been counted so far."""

    round: int
    seats: tuple[Seat, ...]
    store: str
    restarts: int


class LeaveRound(ScriptCommand):
    """The nodes of `hosts` are to end their workers of `round` and wait for another one."""

    round: int
    hosts: tuple[str, ...]
    reason: str


class EndScript(ScriptCommand):
    """`seats` of its last round, `round`; `failure` the first one, if it failed by one, and the node it was on."""

    outcome: str  # succeeded, failed or stopped
    reason: str
    round: int = 0
    seats: tuple[Seat, ...] = ()
    failure: Failure | None = None
    host: str = ""
