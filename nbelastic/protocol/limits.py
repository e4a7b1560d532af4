"""What the user allows."""

from __future__ import annotations

from msgspec import Struct

from nbelastic.protocol.timeouts import Timeouts

NEVER = float("inf")


class Limits(Struct, frozen=True):
    """What the user allows. Times in seconds."""

    min: int = 1
    max: int | None = None
    spares: int = 0
    elastic_timeout: float | None = 600.0  # None: for ever
    reset_limit: int | None = None
    cooldown: tuple[float, float] = (5.0, 300.0)
    healthy: float = 60.0  # a worker that lived this long has its slot's strikes forgiven
    silence: float = 10.0  # for how long a host or a worker may be silent before that is news
    stall: float | None = None  # how long others wait for a member that is behind before it is replaced; None: for ever
    timeouts: Timeouts = Timeouts()
    room: int | None = None  # how many workers the limit of open files on the driver's machine allows; None: any number

    @property
    def asked(self) -> float:
        """How many workers people want started."""
        return NEVER if self.max is None else self.max + self.spares

    @property
    def wanted(self) -> float:
        """How many workers to keep started."""
        return self.asked if self.room is None else min(self.asked, self.room)

    @property
    def patience(self) -> float:
        """For how long there may be too few workers."""
        return NEVER if self.elastic_timeout is None else self.elastic_timeout

    @property
    def most(self) -> float:
        """How many may train at once."""
        return NEVER if self.max is None else self.max
