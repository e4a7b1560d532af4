"""How long each stage and each wait may take. What happens then is said beside each: there is none without an end."""

from __future__ import annotations

from msgspec import Struct


class Timeouts(Struct, frozen=True):
    """In seconds. `docs/how-it-works.md` has the table of what is done at each deadline."""

    settle: float = 1.0  # a ready newcomer waits so long for others that are starting
    grace: float = 1.0  # a broken connection waits so long for the news of a death
    prepare: float = 15.0  # the next world's process group is built beside the training; then newcomers are left out
    silent: float = 600.0  # a worker whose process computes may be silent for so long, unless `stall` says otherwise
    silent_idle: float = 60.0  # the same if its process uses no CPU time: it may be deadlocked

    def prepare_for(self, size: int) -> float:
        """A larger group takes longer to connect."""
        return self.prepare + A_MEMBER * size


A_MEMBER = 0.05  # seconds that each member adds to what all of them connect for
