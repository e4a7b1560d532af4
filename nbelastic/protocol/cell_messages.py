"""Messages about cells between driver and workers, and about values that travel as cells do."""

# mypy: disable-error-code="misc"
# (subclasses of a frozen msgspec struct are frozen, too, which mypy does not know)
from __future__ import annotations

from msgspec import Struct

from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.messages import Blob, Message, Pushed


class CellResult(Message):
    """Worker → driver: what cell `number` has printed, and its error, as one line and with traceback; empty without one.

    It follows the last `CellPiece` of the cell. Of a cell at a commit also: how many collectives it has `begun`, and a hash of
    what it has `changed` in the state (empty: nothing), equal on all ranks that agree.
    """

    worker: WorkerId
    number: int
    stdout: str
    stderr: str
    error: str
    traceback: str
    begun: int = 0
    changed: str = ""


class CellPiece(Message):
    """Worker → driver: what cell `number` has just printed to a stream ("out" or "err"), or a "display": a MIME bundle as JSON."""

    worker: WorkerId
    number: int
    kind: str
    text: str


class StatePulled(Message):
    """Worker → driver: the training state that the `Pull` of this `key` has asked for, or an `error` (one line)."""

    worker: WorkerId
    key: str
    error: str = ""
    state: Blob | None = None


class Pull(Struct, frozen=True):
    """Copy the training state of `job`, or with `name` one value of it, and send it with `StatePulled` after the cell's result.

    `key` names it in the messages that fetch it. `folder`: for the file, on the driver's machine; empty: the driver fetches it.
    """

    job: str
    name: str
    key: str
    folder: str


class Cell(Message):
    """Driver → worker: run this cell between programs; or take the `pushed` values, or `pull` the state of the last job.

    `code`: as of a `Program`.
    """

    number: int
    source: str
    pushed: Pushed | None = None
    pull: Pull | None = None
    code: str = ""


class CommitCell(Message):
    """Driver → member that stands at a commit of this generation: run this cell there, for at most `limit` seconds.

    `everywhere`: all members run it, so it may change the training state. `pull`: send the state instead.
    """

    generation: int
    number: int
    source: str
    limit: float
    everywhere: bool
    pull: Pull | None = None


class InterruptCell(Message):
    """Driver → worker: interrupt this cell, if it runs."""

    number: int


def push_key(number: int) -> str:
    """Names the values of a cell in the messages that fetch them."""
    return f"push-{number}"
