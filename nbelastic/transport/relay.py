"""What a host's processes and the driver say to one another travels in bundles, by the host's agent.

So the driver has one connection a host, gets one message a host at a time, and an order to all workers of a host is one
message to it. The agent looks into nothing: who speaks numbers and confirms its messages itself (`transport.delivery`).
No input or output here: `transport.server` and `transport.client` sends what `due` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nbelastic.protocol.wire import HEAD
from nbelastic.transport.delivery import number_of

HOLD = 0.1  # seconds that what need not arrive waits for more that goes the same way
KIND = 24  # bytes of a report by which those of one peer are told apart: they begin with its type
MOST = 1 << 20  # bytes of a bundle, after which another begins
_BETWEEN = b"\n"  # names


def bundles(messages: Iterable[tuple[bytes, bytes, bytes]]) -> Iterator[list[bytes]]:
    """The frames of messages, each (whose, its head or nothing, what), in bundles of about `MOST` bytes.

    A message that goes to several in a row is in a bundle once. None holds up what else is to go for long.
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
    """Whether these frames, without those that ZeroMQ adds, are a bundle: what is none has one or two."""
    return len(frames) >= 3 and len(frames) % 3 == 0


def opened(frames: Sequence[bytes]) -> Iterator[tuple[bytes, list[bytes]]]:
    """Of each message in a bundle: whose it is, and its frames. ValueError if it was not made by `bundles`."""
    for names, heads, what in zip(frames[::3], frames[1::3], frames[2::3], strict=True):
        each = names.split(_BETWEEN)
        if len(heads) not in (0, len(each) * HEAD.size):
            raise ValueError(f"{len(each)} names and {len(heads)} bytes of heads")
        for i, name in enumerate(each):
            head = heads[i * HEAD.size : (i + 1) * HEAD.size]
            yield name, [head, what] if head else [what]


class Relay:
    """On the way to the driver: numbered messages go at once, with all that waits; heartbeats and reports wait a little.

    What has not gone is replaced by a newer heartbeat or report of its kind, or by the same message that is sent again.
    """

    def __init__(self, hold: float = HOLD) -> None:
        """`hold`: seconds that what need not arrive waits."""
        self._hold = hold
        self._waiting: dict[tuple[bytes, bytes | int], tuple[bytes, bytes, bytes]] = {}
        self._numbered = False  # something of what waits is
        self._since = 0.0

    def take(self, name: bytes, frames: Sequence[bytes], now: float) -> None:
        """Something that a process has sent: a head and a frame. Anything else is dropped."""
        if len(frames) != 2 or len(frames[0]) != HEAD.size or _BETWEEN in name:
            return
        head, what = frames
        if not self._waiting:
            self._since = now
        number = number_of(head)
        if number:
            self._numbered = True
        else:
            self._waiting.pop((name, what[:KIND]), None)  # it goes to the end: after what was said before
        self._waiting[name, number or what[:KIND]] = (name, head, what)

    @property
    def names(self) -> set[bytes]:
        """Whose messages wait."""
        return {name for name, _ in self._waiting}

    def wait(self, now: float) -> float:
        """Seconds until something is due; infinite if nothing waits."""
        if not self._waiting:
            return float("inf")
        return 0.0 if self._numbered else max(0.0, self._since + self._hold - now)

    def due(self, now: float) -> list[list[bytes]]:
        """The bundles that are to go now."""
        if self.wait(now) > 0:
            return []
        waiting, self._waiting, self._numbered = self._waiting, {}, False
        return list(bundles(sorted(waiting.values(), key=lambda message: not message[2])))  # heartbeats side by side
