"""Messages between the driver and torchrun nodes, and which of them each end may send."""

# mypy: disable-error-code="misc"
# (subclasses of a frozen msgspec struct are frozen, too, which mypy does not know)
from __future__ import annotations

from nbelastic.protocol import script_events as sev
from nbelastic.protocol.messages import Message, NewDriver, Rehome, WorkerOutput


class NodeHello(Message):
    """External node → driver: a terminal's torchrun wants to join. Repeated until it is answered.

    `machine`: its `pid_namespace()`. If that is the driver's, the driver can watch the process.
    """

    host: str
    pid: int
    machine: str
    versions: dict[str, str]


class NodeSample(Message):
    """Node → driver: how busy its workers are. Telemetry."""

    host: str
    round: int
    workers: tuple[tuple[float, int], ...]  # by local rank: CPU in percent of one core, resident memory in bytes


class Round(Message):
    """Driver → node: run the workers of this round."""

    round: int
    rank: int  # of this node
    assignments: tuple[sev.Assignment, ...]  # by node rank
    # by node rank: its first rank, the world size, its first rank within its role, the size of that role
    rank_numbers: tuple[tuple[int, int, int, int], ...]
    store: str
    restarts: int  # so far
    job: str


class LeaveRound(Message):
    """Driver → node: end the workers of this round, and wait for another one."""

    round: int
    reason: str


class Wait(Message):
    """Driver → node: no round yet, and why. `full`: because the cluster has no slot for the node."""

    reason: str
    full: bool = False


class EndNode(Message):
    """Driver → node: end; `error`: with a failure."""

    reason: str
    error: bool = True


FromNode = (
    NodeHello
    | NodeSample
    | WorkerOutput
    | sev.NodeReady
    | sev.NodeStarted
    | sev.NodeFailed
    | sev.NodeSucceeded
    | sev.NodeLeft
)


ToNode = NewDriver | Round | LeaveRound | Wait | EndNode | Rehome
