"""What a session needs of a job's checkpoints."""

from __future__ import annotations

from typing import Any, Protocol

from nbelastic.protocol.worker_messages import Checkpoint


class JobCheckpoints(Protocol):
    """The checkpoints of a job: see `state.checkpoints.Plan`."""

    begun: bool

    def resume(self, state: Any) -> None: ...

    def committed(self, state: Any) -> None: ...

    def ended(self, state: Any, turn: int | None) -> None: ...

    def finish(self) -> None: ...

    def report(self, now: float) -> Checkpoint: ...
