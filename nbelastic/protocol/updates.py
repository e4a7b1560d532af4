"""What goes over the driver's socket: requests and their answers, and what has changed since a client was told last."""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct

from nbelastic.protocol import messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.output_buffer import Line
from nbelastic.protocol.requests import AnyRequest, ControllerFound
from nbelastic.protocol.status import EventRecord, Status, WorkerStack

SOCKET = "driver.sock"  # in the run folder
LONGEST = 16 << 20  # bytes of a client's message
LENGTH = struct.Struct("<Q")  # before each message: its bytes


class ToDriver(Struct, frozen=True, tag=True):
    """What a client says."""


class Hello(ToDriver):
    """Which version the client is, what it speaks: see `language`, and who it is, in words."""

    version: str
    language: str
    who: str = ""


class Ask(ToDriver):
    """A request. Its answer has the same number."""

    number: int
    request: Raw  # an `AnyRequest`, which is looked at by itself: what is wrong with it costs no more than its answer


class Cancel(ToDriver):
    """Nobody waits for this answer any more."""

    number: int


class Took(ToDriver):
    """The values of this job are here, mapped: their files may go."""

    job: str


class Bye(ToDriver):
    """To the driver's `Over`: the client has mapped all values, and the run folder may go."""


class ToClient(Struct, frozen=True, tag=True):
    """What the driver says."""


class Welcome(ToClient):
    """The first word. `arguments`: those of `Cluster`, as they are kept. `number`: random, one per start of a cluster."""

    arguments: dict[str, Any]
    log_dir: str
    number: str


class Answer(ToClient):
    number: int
    value: Raw


class Failed(ToClient):
    """An error in the place of an answer: the name of its class in `nbelastic.errors`, and its text. Number 0: the `Hello`'s."""

    number: int
    error: str
    text: str


class JobEnd(Struct, frozen=True):
    """`values`: one per rank; None if the job did not succeed. The rest is as of the `JobError`."""

    values: list[messages.Blob | None] | None
    error: str = ""
    text: str = ""
    rank: int | None = None
    worker: str = ""
    traceback: str = ""


class JobUpdate(Struct, frozen=True):
    """`lines` that were printed since the last update, `rests`: lines without an end that have changed since.

    `members`: of the last world, once the job is over.
    """

    job: str
    lines: list[tuple[WorkerId, Line]] = []
    rests: list[tuple[WorkerId, Line]] = []
    members: tuple[WorkerId, ...] = ()
    end: JobEnd | None = None


class Update(ToClient):
    """All that has changed since the last one; at first, all there is. `status` is a `Status`, the newest.

    `count`: how many events there have been, of which `events` are the newest. `setup`: the setup cells by their keys,
    None if they are as before. `known`: the names of all jobs that the driver still knows. `faulty`: why the driver decides nothing any more; `stopping`: why the
    cluster is being stopped.
    """

    status: Raw
    count: int
    submitted: int
    events: list[EventRecord] = []
    setup: dict[str, str] | None = None
    jobs: list[JobUpdate] = []
    known: list[str] = []
    faulty: str = ""
    stopping: str = ""


class Over(ToClient):
    """The last word: the cluster has stopped. `why` may be empty."""

    why: str


def plain(value: object) -> object:
    """What MessagePack can say, of what it cannot: paths, and numbers of other libraries. TypeError for all else."""
    match value:
        case Path():
            return str(value)
        case Integral():
            return int(value)
        case Real():
            return float(value)
    raise TypeError(f"{value!r} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=plain)


def encoded(value: object) -> Raw:
    """To be part of a message."""
    try:
        return Raw(_encoder.encode(value))
    except (UnicodeEncodeError, OverflowError):
        return Raw(_encoder.encode(_sayable(value)))


def _sayable(value: Any) -> Any:
    """The same with text that is Unicode and integers of 64 bits: neither may keep all else from being said."""
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case int() if not -(1 << 63) <= value < 1 << 64:
            return float(value)
        case Struct():
            return type(value)(*(_sayable(getattr(value, name)) for name in value.__struct_fields__))
        case EventRecord():
            return replace(value, text=_sayable(value.text), host=_sayable(value.host))
        case dict():
            return {_sayable(key): _sayable(each) for key, each in value.items()}
        case list() | tuple():
            return [_sayable(each) for each in value]
    return value


def frame(message: ToDriver | ToClient) -> bytes:
    """As it goes over the socket. TypeError if there is something in it that cannot be sent."""
    data = bytes(encoded(message))
    return LENGTH.pack(len(data)) + data


class Frames:
    """Messages out of a stream of bytes. `limit`: bytes of a message; ValueError for a longer one."""

    def __init__(self, kind: Any, limit: int = 1 << 62) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that these bytes complete. ValueError, or msgspec.DecodeError, for something else than messages."""
        self._data += data
        while len(self._data) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data)
            if length > self._limit:
                raise ValueError(f"a message of {length} bytes")
            end = LENGTH.size + length
            if len(self._data) < end:
                return
            with memoryview(self._data) as view:
                message = self._decoder.decode(bytes(view[LENGTH.size : end]))
            del self._data[:end]
            yield message


FROM_CLIENT = Hello | Ask | Cancel | Took | Bye
FROM_DRIVER = Welcome | Answer | Failed | Update | Over


@cache
def language() -> str:
    """Of everything that goes over the socket: two versions with the same one understand each other."""
    kinds = (FROM_CLIENT, FROM_DRIVER, AnyRequest, Status, ControllerFound, WorkerStack)
    schema = msgspec.json.schema_components(kinds, schema_hook=lambda _: {})
    return hashlib.sha256(msgspec.json.encode(schema, order="sorted")).hexdigest()[:16]


def socket_in(folder: int) -> str:
    """The path of the socket in the folder with this descriptor: the full path may be longer than a socket's may be."""
    return str(Path(f"/proc/self/fd/{folder}") / SOCKET)
