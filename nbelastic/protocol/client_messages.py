"""Messages between a driver and its clients over the driver's unix socket, as MessagePack with a length before each."""

# mypy: disable-error-code="misc"
# (subclasses of a frozen msgspec struct are frozen, too, which mypy does not know)
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
from nbelastic.protocol.report_history import ReportRows
from nbelastic.protocol.requests import AnyRequest, ControllerFound, Piece
from nbelastic.protocol.status import DriverFacts, EventRecord, Status, StepTimes, WorkerStack

SOCKET = "driver.sock"  # in the run folder
LONGEST = 16 << 20  # bytes of a client's message
LENGTH = struct.Struct("<Q")  # before each message: its length in bytes


class ToDriver(Struct, frozen=True, tag=True):
    """Base of all messages from a client."""


class ClientHello(ToDriver):
    """Client → driver, first message: the client's version of nbelastic, its `fingerprint()`, and its name for users."""

    version: str
    fingerprint: str
    name: str = ""


class Ask(ToDriver):
    """Client → driver: a request. Its answer has the same number."""

    number: int
    request: Raw  # an `AnyRequest`; it is decoded by itself, so that an error in it fails only this request


class Cancel(ToDriver):
    """Client → driver: do not answer the request with this number."""

    number: int


class ValuesMapped(ToDriver):
    """Client → driver: the client has mapped the files of this job's values; the driver may remove them."""

    job: str


class Goodbye(ToDriver):
    """Client → driver: the answer to `Stopped`: the client has mapped all values; the run folder may be removed."""


class ToClient(Struct, frozen=True, tag=True):
    """Base of all messages from the driver."""


class DriverHello(ToClient):
    """Driver → client, first message: the cluster."""

    arguments: dict[str, Any]  # of `Cluster`, as the driver snapshot has them
    log_dir: str
    number: str  # random, one per start of a cluster
    driver: DriverFacts


class Answer(ToClient):
    """Driver → client: the answer to the request with this number."""

    number: int
    value: Raw


class Part(ToClient):
    """Driver → client: a piece of output, before the answer to the request with this number."""

    number: int
    piece: Piece


class Failed(ToClient):
    """Driver → client: an error instead of an answer: its class in `nbelastic.errors`, and its text. 0: to `ClientHello`."""

    number: int
    error: str
    text: str


class JobEnd(Struct, frozen=True):
    """The end of a job: its values, or the attributes of its `JobError`."""

    values: list[messages.Blob | None] | None  # by rank; None if the job did not succeed
    error: str = ""
    text: str = ""
    rank: int | None = None
    worker: str = ""
    traceback: str = ""


class JobUpdate(Struct, frozen=True):
    """The changes in a job since the last update."""

    job: str
    lines: list[tuple[WorkerId, Line]] = []  # new ones
    unfinished: list[tuple[WorkerId, Line]] = []  # lines, such as progress bars, that have changed
    members: tuple[WorkerId, ...] = ()  # of the last world, once the job has ended
    end: JobEnd | None = None


class Update(ToClient):
    """Driver → client: all that has changed since the last update; in the first one, the whole state."""

    status: Raw  # the newest `Status`
    event_count: int  # of all events so far
    submitted_jobs: int  # so far
    events: list[EventRecord] = []  # new ones
    setup_cells: dict[str, str] | None = None  # by key; None: unchanged
    jobs: list[JobUpdate] = []
    known_jobs: list[str] = []  # names of all jobs that the driver has not forgotten
    decision_failure: str = ""  # why the driver makes no more decisions
    stopping: str = ""  # why the cluster is being stopped
    reports: ReportRows | None = None  # of the present or last job; None: no new ones


class Stopped(ToClient):
    """Driver → client, last message: the cluster has stopped. `why` may be empty."""

    why: str


def _to_builtin(value: object) -> object:
    """Convert paths, and numbers of other libraries, to types that MessagePack has. TypeError for any other type."""
    match value:
        case Path():
            return str(value)
        case Integral():
            return int(value)
        case Real():
            return float(value)
    raise TypeError(f"{value!r} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_builtin)


def encoded(value: object) -> Raw:
    """Encode a part of a message. TypeError for a value of a type that cannot be sent."""
    try:
        return Raw(_encoder.encode(value))
    except (UnicodeEncodeError, OverflowError):
        return Raw(_encoder.encode(_encodable(value)))


def _encodable(value: Any) -> Any:
    """Replace text that is not Unicode, and integers beyond 64 bits, so that the rest of the message can be sent."""
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case int() if not -(1 << 63) <= value < 1 << 64:
            return float(value)
        case Struct():
            return type(value)(*(_encodable(getattr(value, name)) for name in value.__struct_fields__))
        case EventRecord():
            return replace(value, text=_encodable(value.text), host=_encodable(value.host))
        case dict():
            return {_encodable(key): _encodable(each) for key, each in value.items()}
        case list() | tuple():
            return [_encodable(each) for each in value]
    return value


def frame(message: ToDriver | ToClient) -> bytes:
    """A message with its length, as the socket transports it. TypeError for a value that cannot be sent."""
    data = bytes(encoded(message))
    return LENGTH.pack(len(data)) + data


class Frames:
    """Decodes messages from a stream of bytes. `limit`: the most bytes of a message."""

    def __init__(self, kind: Any, limit: int = 1 << 62) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes. ValueError for one that is too long; msgspec.DecodeError for an invalid one."""
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


FROM_CLIENT = ClientHello | Ask | Cancel | ValuesMapped | Goodbye
FROM_DRIVER = DriverHello | Part | Answer | Failed | Update | Stopped


@cache
def fingerprint() -> str:
    """The fingerprint of all messages of the socket. Versions with the same one understand each other."""
    kinds = (FROM_CLIENT, FROM_DRIVER, AnyRequest, Status, ControllerFound, StepTimes, WorkerStack)
    schema = msgspec.json.schema_components(kinds, schema_hook=lambda _: {})
    return hashlib.sha256(msgspec.json.encode(schema, order="sorted")).hexdigest()[:16]
