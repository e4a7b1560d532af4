"""An agent relays the messages between its host's processes and the driver, in bundles.

The driver has one connection for each host and reads one bundle at a time. A message to all workers of a host is sent to it
once. The agent does not look into messages: the two ends number and acknowledge them (`transport.delivery`). This
module does no input or output: `transport.client` sends what `due` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nbelastic.protocol.messages import HEAD
from nbelastic.transport.delivery import number_of

HOLD = 0.1  # seconds that a message without a number waits for others
KIND = 24  # bytes of a report that identify its kind: it begins with its type
MOST = 1 << 20  # bytes after which another bundle begins
_BETWEEN = b"\n"  # between names


def bundles(messages: Iterable[tuple[bytes, bytes, bytes]]) -> Iterator[list[bytes]]:
    """Pack messages, each (name, head or b"", frame), into bundles of about `MOST` bytes.

    A frame for several peers in a row is in the bundle once. The size limit keeps a bundle from delaying others.
    """
    frames: list[bytes] = []
    names: list[bytes] = []
    heads: list[bytes] = []
    what, size = b"", 0
    for name, head, frame in messages:
        if names and (frame != what or bool(head) != bool(heads[0])):
            frames += (_BETWEEN.join(names), b"".join(heads), what)
            size += len(what)
            names, heads = [], []
            if size >= MOST:
                yield frames
                frames, size = [], 0
        what = frame
        names.append(name)
        heads.append(head)
    if names:
        yield [*frames, _BETWEEN.join(names), b"".join(heads), what]


def is_bundle(frames: Sequence[bytes]) -> bool:
    """Whether these frames, without ZeroMQ's own, are a bundle. A single message has one or two frames."""
    pairs = zip(frames[::3], frames[1::3], strict=False)
    return len(frames) >= 3 and len(frames) % 3 == 0 and all(_fit(names, heads) for names, heads in pairs)


def _fit(names: bytes, heads: bytes) -> bool:
    """Whether there is a head for each name, or none at all."""
    return not heads or len(heads) == (names.count(_BETWEEN) + 1) * HEAD.size


def opened(frames: Sequence[bytes]) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield the name and the frames of each message in a bundle. ValueError if `bundles` did not make it."""
    for names, heads, what in zip(frames[::3], frames[1::3], frames[2::3], strict=True):
        each = names.split(_BETWEEN)
        if not _fit(names, heads):
            raise ValueError(f"{len(each)} names and {len(heads)} bytes of heads")
        for i, name in enumerate(each):
            head = heads[i * HEAD.size : (i + 1) * HEAD.size]
            yield name, [head, what] if head else [what]


class Relay:
    """Messages to the driver: a numbered one is due at once, with all that wait; heartbeats and reports wait a little.

    A newer heartbeat or report replaces a waiting one of its kind. A retransmitted message replaces its first copy.
    """

    def __init__(self, hold: float = HOLD) -> None:
        """`hold`: seconds that a message without a number waits."""
        self._hold = hold
        self._waiting: dict[tuple[bytes, bytes | int], tuple[bytes, bytes, bytes]] = {}
        self._numbered = False  # a numbered message waits
        self._since = 0.0

    def take(self, name: bytes, frames: Sequence[bytes], now: float) -> None:
        """Add a message of a process: a head and a frame. Drop anything else."""
        if len(frames) != 2 or len(frames[0]) != HEAD.size or _BETWEEN in name:
            return
        head, what = frames
        if not self._waiting:
            self._since = now
        number = number_of(head)
        if number:
            self._numbered = True
        else:
            self._waiting.pop((name, what[:KIND]), None)  # move it to the end, after earlier messages
        self._waiting[name, number or what[:KIND]] = (name, head, what)

    @property
    def names(self) -> set[bytes]:
        """The peers whose messages wait."""
        return {name for name, _ in self._waiting}

    def wait(self, now: float) -> float:
        """Seconds until a message is due; infinite if none waits."""
        if not self._waiting:
            return float("inf")
        return 0.0 if self._numbered else max(0.0, self._since + self._hold - now)

    def due(self, now: float) -> list[list[bytes]]:
        """The bundles to send now."""
        if self.wait(now) > 0:
            return []
        waiting, self._waiting, self._numbered = self._waiting, {}, False
        return list(bundles(sorted(waiting.values(), key=lambda message: not message[2])))  # heartbeats side by side
