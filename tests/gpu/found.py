"""What the environment report has found: it decides which parts can run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    """`kind`: cuda, cpu or double. `nccl`: its version, () without it."""

    kind: str
    gpus: int = 0
    nccl: tuple[int, ...] = ()
