"""What is said of a script's nodes: events, in the past tense.

A *node* is an elastic agent of torch's with the workers of its host: one on each host of the cluster while a script runs
(its name is the host's), and each `torchrun` that came from a terminal. A *round* is the life of one worker group.
"""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from msgspec import Struct

from nbelastic.protocol.events import Event
from nbelastic.protocol.limits import Limits

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


class Assignment(Struct, frozen=True):
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

    `workers`: how many it can run, 0: as many as its host has slots. `external`: it came by itself, from a terminal, for the
    job `job` (empty: whichever runs); its number of workers is fixed.
    """

    host: str
    round: int
    store: str
    role: str
    workers: int = 0
    external: bool = False
    job: str = ""
    pid: int = 0


class ExternalNodeJoined(Event):
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


class HostsChanged(Event):
    """The cluster's hosts that are up, the oldest first, with their slots; and its limits.

    `lost`: those that are not up because something has happened to them. Who is in neither has left as somebody wanted.
    """

    hosts: tuple[tuple[str, int], ...]
    limits: Limits
    lost: tuple[str, ...] = ()


class ScriptStopped(Event):
    """Somebody wants it to end."""

    reason: str


class Tick(Event):
    """Time has."""
