"""The limits of a cluster that its users set: world size, patience, back-off, deadlines."""

from __future__ import annotations

from msgspec import Struct

from nbelastic.protocol.timeouts import Timeouts

NEVER = float("inf")


class Limits(Struct, frozen=True):
    """Arguments of `Cluster`, with the same meaning. Times in seconds."""

    min: int = 1
    max: int | None = None
    spares: int = 0
    elastic_timeout: float | None = 600.0  # None: no limit
    reset_limit: int | None = None
    cooldown: tuple[float, float] = (5.0, 300.0)
    healthy: float = 60.0  # after so long a life of a worker, earlier failures of its slot are cleared
    silence: float = 10.0  # without a message for so long, a host or worker is unresponsive
    stall: float | None = None  # a member that keeps the others waiting for so long is replaced; None: never
    exclude_differing: bool = False  # leave the host of a rank out whose training state differs from the others'
    timeouts: Timeouts = Timeouts()
    backend: str = "auto"
    shares_gpus: bool = False  # with the back end nccl, several workers may use one GPU
    room: int | None = None  # workers that the limit of open files on the driver's machine allows; None: any number

    @property
    def asked(self) -> float:
        """How many workers the user wants to be started."""
        return NEVER if self.max is None else self.max + self.spares

    @property
    def wanted(self) -> float:
        """How many workers the driver keeps started: `asked`, as far as there is `room`."""
        return self.asked if self.room is None else min(self.asked, self.room)

    @property
    def patience(self) -> float:
        """For how many seconds there may be too few workers."""
        return NEVER if self.elastic_timeout is None else self.elastic_timeout

    @property
    def most(self) -> float:
        """The largest world size."""
        return NEVER if self.max is None else self.max
