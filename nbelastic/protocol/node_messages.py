"""Messages between the driver and torchrun nodes, and which of them each end may send."""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from nbelastic.protocol import script_events as sev
from nbelastic.protocol.messages import Message, Rehome, Welcome, WorkerOutput


class NodeHello(Message):
    """A guest's first words, until it is answered. `machine`: which one it is on, so that its end can be watched."""

    host: str
    pid: int
    machine: str
    versions: dict[str, str]


class NodeSample(Message):
    """Of each worker of a node, by local rank: CPU in percent of one core, resident memory in bytes."""

    host: str
    round: int
    workers: tuple[tuple[float, int], ...]


class Round(Message):
    """A `FormRound` as one node gets it. `places` are of each seat, by group rank: see `group.places`."""

    round: int
    rank: int
    assignments: tuple[sev.Assignment, ...]
    places: tuple[tuple[int, int, int, int], ...]
    store: str
    restarts: int
    job: str


class LeaveRound(Message):
    round: int
    reason: str


class Wait(Message):
    """Not yet, and why. `full`: because there is no room."""

    reason: str
    full: bool = False


class EndNode(Message):
    """The node is to end; `error`: as one that has failed."""

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


ToNode = Welcome | Round | LeaveRound | Wait | EndNode | Rehome
