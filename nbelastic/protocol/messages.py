"""Messages between the driver and its peers that several kinds of peers share, and the frame before each message.

An event that a worker or agent sends is the struct that `step` takes.
"""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

import struct

from msgspec import Struct

from nbelastic.protocol.ids import WorkerId


class Message(Struct, frozen=True, tag=True):
    """A message that is not an event of the core."""


class Welcome(Message):
    """From a driver that has taken the cluster over, to everybody whom it does not know yet: say who and where you are.

    `term` counts the cluster's drivers. Who has been welcomed with a higher one does not answer.
    """

    term: int


class Blob(Struct, frozen=True):
    """What `pickling.pack` made, of `size` bytes: `data`, or in a file at `path`; or neither, and the receiver fetches it."""

    size: int
    data: bytes = b""
    path: str = ""


class WorkerOutput(Message):
    """What the program of `job` wrote to `stream` (out or err), up to position `end` of all that it has written there.

    It may be said again, and some may be missing: the positions tell. The end may be a line that is not finished; a later
    text that begins with a carriage return replaces it. `rank`: the worker's when it wrote this.
    """

    worker: WorkerId
    stream: str
    text: str
    end: int
    job: str = ""
    rank: int | None = None


class Rehome(Message):
    """To an agent, for the workers it will start, and to each of its host's workers: your stores listen here from now on."""

    address: str
    interface: str


HEAD = struct.Struct("<QQQQQ")
