"""Messages that several kinds of peers send or receive, and the frame before each message.

An event that an agent, worker or node sends is the struct that the core receives: see `events`.
"""

# mypy: disable-error-code="misc"
# (subclasses of a frozen msgspec struct are frozen, too, which mypy does not know)
from __future__ import annotations

import struct

from msgspec import Struct

from nbelastic.protocol.ids import WorkerId


class Message(Struct, frozen=True, tag=True):
    """Base of all messages that are not events of the core."""


class NewDriver(Message):
    """Driver → agent, worker, node: a new driver has taken the cluster over; report your state.

    `term`: the number of this driver among the cluster's drivers. A peer ignores terms below the highest it has received.
    """

    term: int


class Blob(Struct, frozen=True):
    """A value that `pickling.pack` has made, of `size` bytes: in `data`, in the file `path`, or to be fetched in pieces."""

    size: int
    data: bytes = b""
    path: str = ""


class Pushed(Struct, frozen=True):
    """Values that a client has packed as a dict, for the namespaces of all workers. `names`: its keys."""

    names: tuple[str, ...]
    values: Blob


class WorkerOutput(Message):
    """Worker, node → driver: the program of `job` has written `text` to `stream` ("out" or "err").

    `end`: the position of the text's end among all characters of the stream. Texts may overlap or be missing, as the
    positions show. The last line may be unfinished; later text that begins with a carriage return replaces it.
    """

    worker: WorkerId
    stream: str
    text: str
    end: int
    job: str = ""
    rank: int | None = None  # the worker's rank at that time
    at: float = 0.0  # when the driver has received it, in seconds since 1970; the driver sets it


class Rehome(Message):
    """Driver → agent, worker, node: stores must listen at `address` from now on. An agent passes it to new workers."""

    address: str
    interface: str


HEAD = struct.Struct("<QQQQQ")  # the frame before a message: see `transport.delivery`
