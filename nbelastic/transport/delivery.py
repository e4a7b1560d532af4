"""Numbered messages over connections that may break: each message arrives once, and in order.

A connection that breaks loses what is on its way, in both directions, and neither end is told. So messages are numbered and
kept until the other end confirms them. At most `WINDOW` of them are on their way. What is not confirmed in time is sent
again, the first `RETRANSMIT_BATCH` only, and with pauses that grow while the other end is silent. No input or output here:
`transport.server` and `transport.client` sends what `due` returns.
"""

from __future__ import annotations

from collections import deque

from nbelastic.protocol.wire import HEAD

MAX_UNACKNOWLEDGED = (
    1000  # messages that wait to be confirmed; of more the oldest are given up, and counted in `discarded`
)
WINDOW = 64  # messages on their way that the other end has not confirmed
RETRANSMIT_BATCH = 8  # messages that are sent again at a time
MAX_DOUBLINGS = 3  # how often the pause before the next resend doubles, at most


def number_of(head: bytes) -> int:
    """Of the message behind this head, which is kept until it is confirmed. 0: it is not, as a report."""
    number: int = HEAD.unpack(head)[1]
    return number


class Delivery:
    """One end. `patience`: seconds after which what is not confirmed is sent again.

    Ends are told apart by numbers, `me`, which have to be random: what was said to one is not for the next of its name. One
    that has forgotten the other end goes on as the same, with higher numbers than before: `number`.
    """

    def __init__(self, patience: float, me: int, number: int = 0) -> None:
        self._patience = patience
        self._me = me
        self._number = number  # of the last message
        self._kept: deque[bytes] = deque()
        self._sent = number  # up to this number all is on its way
        self._top = number  # the highest number that was ever sent
        self._limit = 0  # while messages are sent again: up to which number; else 0
        self._since = 0.0  # when something was confirmed last, or sent again
        self._pauses = 0  # how often the pause has doubled
        self._other = 0
        self._heard = 0
        self._heard_at = 0.0
        self.must_acknowledge = False  # a message has come since the last head was made
        self.discarded = 0  # messages that were dropped because too many waited

    def head(self, number: int = 0) -> bytes:
        """What goes before a message. 0: before one that is not kept, or before none; it confirms what has arrived."""
        self.must_acknowledge = False
        return HEAD.pack(self._me, number, self._confirmed + 1, self._other, self._heard)

    @property
    def _confirmed(self) -> int:
        """All messages up to this number are confirmed or given up."""
        return self._number - len(self._kept)

    @property
    def waiting(self) -> int:
        """How many messages are not confirmed."""
        return len(self._kept)

    @property
    def congested(self) -> bool:
        """Whether so many messages wait that more of what can be shortened should wait elsewhere."""
        return len(self._kept) >= WINDOW

    def enqueue(self, message: bytes) -> None:
        """Number a message and keep it until it is confirmed; `due` sends it."""
        self._number += 1
        self._kept.append(message)
        if len(self._kept) > MAX_UNACKNOWLEDGED:
            self._kept.popleft()
            self.discarded += 1
            self._sent, self._top = max(self._sent, self._confirmed), max(self._top, self._confirmed)
            if self._limit <= self._confirmed:  # all that was to be sent again is given up
                self._limit = 0

    def due(self, now: float) -> list[tuple[bytes, bytes]]:
        """Heads and messages to send now: new ones, and again the first of those that were not confirmed in time."""
        confirmed = self._confirmed
        if self._sent > confirmed and now - self._since >= self._patience * 2**self._pauses:
            self._pauses = min(self._pauses + 1, MAX_DOUBLINGS)
            self._sent, self._limit = confirmed, confirmed + RETRANSMIT_BATCH
        if self._sent == confirmed:
            self._since = now
        first, self._sent = self._sent, max(self._sent, min(self._number, self._limit or confirmed + WINDOW))
        self._top = max(self._top, self._sent)
        return [(self.head(number), self._kept[number - confirmed - 1]) for number in range(first + 1, self._sent + 1)]

    def receive(self, head: bytes, now: float) -> bool:
        """Whether the message behind this head is the next one.

        Else it is known already, one before it was lost, it was meant for another end, or it has no number.
        """
        who, number, first, whom, heard = HEAD.unpack(head)
        if now - self._heard_at > self._patience:
            self._pauses = 0  # the other end is back
        self._heard_at = now
        if whom == self._me and heard > self._confirmed:
            self._acknowledge(min(heard, self._number), now)
        if not number or whom not in (0, self._me):
            return False
        if who != self._other:
            if self._other:
                self.reset()
            self._other, self._heard = who, 0
        self.must_acknowledge = True
        self._heard = max(self._heard, first - 1)  # what came before is confirmed, or given up
        if number != self._heard + 1:
            return False
        self._heard = number
        return True

    def _acknowledge(self, heard: int, now: float) -> None:
        for _ in range(heard - self._confirmed):
            self._kept.popleft()
        self._since, self._pauses = now, 0
        if heard > self._sent:  # more than was sent again: the first copies were late, not lost
            self._sent = max(self._top, heard)
        if heard >= min(self._limit, self._sent):  # all that was sent again: go on with what follows
            self._limit = 0

    def is_addressed_here(self, head: bytes) -> bool:
        """Whether who speaks has heard this end."""
        whom: int = HEAD.unpack(head)[3]
        return whom == self._me

    def reset(self) -> None:
        """Drop all messages that are not confirmed."""
        self._kept.clear()
        self._sent = self._top = self._number
        self._limit = self._pauses = 0
