"""Numbered messages over connections that may break: each message arrives once, and in order.

A connection that breaks loses messages in both directions, and neither end notices. So messages are numbered and kept until
the other end acknowledges them. At most `WINDOW` are in flight. Messages that are not acknowledged in time are
retransmitted: the first `RETRANSMIT_BATCH` only, with pauses that grow until it acknowledges one. This module does no input
or output: `transport.server` and `transport.client` send what `due` returns.
"""

from __future__ import annotations

from collections import deque

from nbelastic.protocol.messages import HEAD

MAX_UNACKNOWLEDGED = 1000  # unacknowledged messages; beyond that the oldest are discarded, and counted in `discarded`
WINDOW = 64  # unacknowledged messages in flight
RETRANSMIT_BATCH = 8  # messages retransmitted at a time
MAX_DOUBLINGS = 3  # at most so many times the pause before a retransmission doubles
MAX_RETURNS = 3  # so often an end that acknowledges nothing may come back with short pauses


def number_of(head: bytes) -> int:
    """The number in a head. 0: the message is not kept until it is acknowledged, as a report."""
    number: int = HEAD.unpack(head)[1]
    return number


class Delivery:
    """One end of a session. `patience`: seconds after which an unacknowledged message is retransmitted.

    `session` is a random number that identifies this end: a message for it must not reach a later end of the same name. An
    end that has forgotten the other one goes on with higher numbers than before, from `number` on.
    """

    def __init__(self, patience: float, session: int, number: int = 0) -> None:
        self._patience = patience
        self._session = session
        self._last_number = number  # of the last message
        self._unacknowledged: deque[bytes] = deque()
        self._sent_up_to = number  # all messages up to this number are in flight
        self._highest_sent = number  # the highest number sent so far
        self._retransmit_up_to = 0  # the last number of the present retransmission; 0: none
        self._progress_at = 0.0  # time of the last acknowledgement or retransmission
        self._doublings = 0  # how often the pause has doubled so far
        self._returns = 0  # how often the other end came back since it last acknowledged a message
        self._peer_session = 0
        self._received_up_to = 0
        self._received_at = 0.0
        self.received_since_head = 0  # messages, also duplicates
        self.discarded = 0  # messages dropped because too many were unacknowledged

    def head(self, number: int = 0) -> bytes:
        """The frame before a message. It acknowledges received messages. 0: the message is not kept, or there is none."""
        self.received_since_head = 0
        return HEAD.pack(self._session, number, self._acknowledged_up_to + 1, self._peer_session, self._received_up_to)

    @property
    def _acknowledged_up_to(self) -> int:
        """All messages up to this number are acknowledged or discarded."""
        return self._last_number - len(self._unacknowledged)

    @property
    def pending(self) -> int:
        """The number of unacknowledged messages."""
        return len(self._unacknowledged)

    @property
    def must_acknowledge(self) -> bool:
        """Whether a message was received since the last head."""
        return self.received_since_head > 0

    @property
    def congested(self) -> bool:
        """Whether so many messages are unacknowledged that output should wait at its source."""
        return len(self._unacknowledged) >= WINDOW

    def enqueue(self, message: bytes) -> None:
        """Number a message and keep it until it is acknowledged. `due` returns it for sending."""
        self._last_number += 1
        self._unacknowledged.append(message)
        if len(self._unacknowledged) > MAX_UNACKNOWLEDGED:
            self._unacknowledged.popleft()
            self.discarded += 1
            self._sent_up_to, self._highest_sent = (
                max(self._sent_up_to, self._acknowledged_up_to),
                max(self._highest_sent, self._acknowledged_up_to),
            )
            if self._retransmit_up_to <= self._acknowledged_up_to:  # the whole retransmission is discarded
                self._retransmit_up_to = 0

    def due(self, now: float, unread: float = 0.0) -> list[tuple[bytes, bytes]]:
        """Heads and messages to send now: new ones, and the first of those that were not acknowledged in time.

        `unread`: seconds for which received messages may wait to be read: an acknowledgement may be among them. Infinity:
        nothing is sent again.
        """
        if not self._unacknowledged:
            return []
        start = self._acknowledged_up_to
        if start == self._sent_up_to == self._last_number - 1 and not self._retransmit_up_to:  # as nearly always
            self._progress_at, self._sent_up_to = now, self._last_number
            self._highest_sent = max(self._highest_sent, self._last_number)
            return [(self.head(self._last_number), self._unacknowledged[0])]
        if self._sent_up_to > start and now - unread - self._progress_at >= self._patience * 2**self._doublings:
            self._doublings = min(self._doublings + 1, MAX_DOUBLINGS)
            self._sent_up_to, self._retransmit_up_to = start, start + RETRANSMIT_BATCH
        if self._sent_up_to == start:
            self._progress_at = now
        first, self._sent_up_to = (
            self._sent_up_to,
            max(self._sent_up_to, min(self._last_number, self._retransmit_up_to or start + WINDOW)),
        )
        self._highest_sent = max(self._highest_sent, self._sent_up_to)
        return [
            (self.head(number), self._unacknowledged[number - start - 1])
            for number in range(first + 1, self._sent_up_to + 1)
        ]

    def hear(self, now: float) -> None:
        """The other end has sent something. After a silence it is back: messages were lost, and the pause is short again.

        An end that comes back again and again without an acknowledgement is late: it has yet to read what it was sent.
        """
        silence, self._received_at = now - self._received_at, now
        if self._doublings and silence > self._patience:
            if self._returns < MAX_RETURNS or silence > self._patience * 2**MAX_DOUBLINGS:
                self._doublings = 0
            self._returns += 1

    def receive(self, head: bytes, now: float) -> bool:
        """Read a head. Return whether its message is the next in order.

        Otherwise it is a duplicate, an earlier message was lost, it is for another end, or it has no number.
        """
        sender, number, first, recipient, acknowledged = HEAD.unpack(head)
        self.hear(now)
        if self._unacknowledged and recipient == self._session and acknowledged > self._acknowledged_up_to:
            self._acknowledge(min(acknowledged, self._last_number), now)
        if not number or recipient not in (0, self._session):
            return False
        if sender != self._peer_session:
            if self._peer_session:
                self.reset()
            self._peer_session, self._received_up_to = sender, 0
        self.received_since_head += 1
        self._received_up_to = max(self._received_up_to, first - 1)  # the other end has discarded earlier messages
        if number != self._received_up_to + 1:
            return False
        self._received_up_to = number
        return True

    def _acknowledge(self, acknowledged: int, now: float) -> None:
        for _ in range(acknowledged - self._acknowledged_up_to):
            self._unacknowledged.popleft()
        self._progress_at, self._doublings, self._returns = now, 0, 0
        if acknowledged > self._sent_up_to:  # more than was retransmitted: the first copies were late, not lost
            self._sent_up_to = max(self._highest_sent, acknowledged)
        if acknowledged >= min(self._retransmit_up_to, self._sent_up_to):  # the retransmission has arrived
            self._retransmit_up_to = 0

    def is_addressed_here(self, head: bytes) -> bool:
        """Whether the sender knows this end's session."""
        recipient: int = HEAD.unpack(head)[3]
        return recipient == self._session

    def reset(self) -> None:
        """Discard all unacknowledged messages."""
        self._unacknowledged.clear()
        self._sent_up_to = self._highest_sent = self._last_number
        self._retransmit_up_to = self._doublings = self._returns = 0
