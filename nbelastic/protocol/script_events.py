"""Events of a script's nodes, in the past tense.

A *node* is torch's elastic agent with the workers of its host. While a script runs, each host of the cluster has one, whose
name is the host's; each `torchrun` of a terminal is an external node. A *round* is the life of one worker group.
"""

# mypy: disable-error-code="misc"
# (subclasses of a frozen msgspec struct are frozen, too, which mypy does not know)
from __future__ import annotations

from msgspec import Struct

from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.events import Event


class Failure(Struct, frozen=True):
    """How a worker of a script failed."""

    rank: int  # of its round
    local_rank: int
    code: int  # negative: the number of the signal that killed it
    error: str  # one line
    traceback: str = ""  # of the worker, if it has written one
    ago: float = 0.0  # seconds before the report; clocks of different hosts cannot be compared


class Assignment(Struct, frozen=True):
    """A node's part of a round: how many workers it runs, and in which role."""

    host: str
    workers: int
    role: str


class Terms(Struct, frozen=True):
    """How a script's workers are restarted, beside the cluster's limits."""

    max_restarts: int = 0
    nproc: int | None = None  # workers per host; None: one per slot
    leave: float = 35.0  # seconds in which a node must end its workers


class ScriptSubmitted(Event):
    """Client → core: run a script. After the driver was lost: run it again, after its `round` rounds so far."""

    job: str
    target: str
    terms: Terms
    round: int = 0


class NodeReady(Event):
    """Node → core: the node waits for a round, has left `round` (0: none), and offers a store at `store`.

    `workers`: how many it runs; 0: one per slot of its host. `external`: it is a terminal's. `job`: the only job that it
    joins; empty: any. `pid`: of the node's process.
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
    """Driver → core, after the hello: a terminal's node wants to join."""

    host: str
    pid: int
    on_driver_machine: bool = False


class NodeMoved(Event):
    """Core → script: the node must offer its store at another address; the offered one is not valid any more."""

    host: str


class NodeStarted(Event):
    """Node → core: the workers of its round run. `pids`: by local rank; empty if the node cannot know them."""

    host: str
    round: int
    pids: tuple[int, ...] = ()


class NodeFailed(Event):
    """Node → core: workers of its round have failed, and it has ended the others. It then waits for a round, or leaves."""

    host: str
    round: int
    failures: tuple[Failure, ...] = ()


class NodeSucceeded(Event):
    """Node → core: all its workers of this round have ended successfully."""

    host: str
    round: int


class NodesHeard(Event):
    """Driver → core: these nodes have sent messages a while after the newest failure, so they live."""

    hosts: tuple[str, ...]


class NodeLeft(Event):
    """Node, driver → core: the node has ended. `broken`: unexpectedly."""

    host: str
    reason: str
    broken: bool = False


class HostsChanged(Event):
    """Core → script: the hosts that are up, the oldest first, each with its slots; and the limits.

    `lost`: hosts that are not up because of a failure. Any other missing host was removed.
    """

    hosts: tuple[tuple[str, int], ...]
    limits: Limits
    lost: tuple[str, ...] = ()


class ScriptStopped(Event):
    """Client, core → script: stop it."""

    reason: str


class Ticked(Event):
    """Core → script: a deadline has passed."""
