"""What two ends say to one another over connections that may break: each message is heard once, and in order.

A connection that breaks takes along what is on its way, in both directions, and neither end is told. So messages are numbered
and kept until the other end has said that it has heard them; what is not confirmed in time is sent again. No input or output
here: `nbelastic.link` sends what this says.
"""

from __future__ import annotations

import struct
from collections import deque

KEPT = 1000  # messages that wait to be confirmed; of more the oldest are given up
# who speaks, the message's number, the first one kept; whom it has heard, up to which number
HEAD = struct.Struct("<QQQQQ")


class Delivery:
    """One end. `patience`: seconds after which what is not confirmed is sent again.

    Ends are told apart by numbers, `me`, which have to be random: what was said to one is not for the next of its name. One
    that has forgotten the other end goes on as the same, with higher numbers than before: `number`.
    """

    def __init__(self, patience: float, me: int, number: int = 0) -> None:
        self._patience = patience
        self._me = me
        self._number = number
        self._kept: deque[tuple[int, bytes]] = deque()
        self._since = 0.0  # when something was confirmed last, or sent again
        self._other = 0
        self._heard = 0

    def head(self, number: int = 0) -> bytes:
        """What goes before a message; 0: before none, a sign of life that confirms what was heard."""
        first = self._kept[0][0] if self._kept else self._number + 1
        return HEAD.pack(self._me, number, first, self._other, self._heard)

    def say(self, message: bytes, now: float) -> bytes:
        """Number a message that goes out `now`, and keep it. Its head."""
        if not self._kept:
            self._since = now
        self._number += 1
        self._kept.append((self._number, message))
        if len(self._kept) > KEPT:
            self._kept.popleft()
        return self.head(self._number)

    def hear(self, head: bytes, now: float) -> bool:
        """Whether the message behind this head is the next one.

        Else it is known already, one before it was lost, or it was meant for another.
        """
        who, number, first, whom, heard = HEAD.unpack(head)
        if whom == self._me:
            while self._kept and self._kept[0][0] <= heard:
                self._kept.popleft()
                self._since = now
        if not number or whom not in (0, self._me):
            return False
        if who != self._other:
            if self._other:
                self.give_up()
            self._other, self._heard = who, 0
        self._heard = max(self._heard, first - 1)  # what came before is confirmed, or given up
        if number != self._heard + 1:
            return False
        self._heard = number
        return True

    def answers(self, head: bytes) -> bool:
        """Whether who speaks has heard this end."""
        whom: int = HEAD.unpack(head)[3]
        return whom == self._me

    def again(self, now: float) -> list[tuple[bytes, bytes]]:
        """Heads and messages that are to be sent again, if it is time for that."""
        if not self._kept or now - self._since < self._patience:
            return []
        self._since = now
        return [(self.head(number), message) for number, message in self._kept]

    def give_up(self) -> None:
        """Nobody is to hear any more what has not been heard."""
        self._kept.clear()
