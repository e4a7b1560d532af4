"""What a client wants to happen at a commit: cells that run there, a new program, or a pause. `halts` decides on it."""

from __future__ import annotations

from msgspec import Struct

from nbelastic.core.persistent import EMPTY, PersistentSet
from nbelastic.protocol.cluster_limits import NEVER
from nbelastic.protocol.ids import WorkerId


class CommitCell(Struct, frozen=True):
    """A cell that runs at a commit. `ranks`: only on these; empty: on all. `limit`: seconds."""

    number: int
    ranks: tuple[int, ...]
    limit: float


class Halt(Struct, frozen=True):
    """Of the present job."""

    cells: tuple[CommitCell, ...] = ()  # that have not ended, in order; only the first one may run
    swap: int = 0  # the program that is to replace the present one; 0: none
    paused_by: str = ""  # the client that has paused the training; empty: it is not paused
    steps: int = 0  # that the paused training makes once it stands still
    steps_to: int = 0  # commit of this generation up to which the paused training runs; 0: none
    asked: bool = False  # the members were asked for their commits in order to halt, not to leave
    commit: int = 0  # of this generation, at which the members stop
    running: PersistentSet[WorkerId] = EMPTY  # members that run the first cell
    ended: dict[WorkerId, tuple[int, str]] = {}  # who has run it: collectives that it began, a hash of what it changed
    until: float = NEVER  # when the world breaks if the cell has not ended
