"""The random generators that training draws from: torch's on the CPU and this GPU, Python's, NumPy's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def get_states() -> dict[str, Any]:
    """The present state of each generator."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_states(states: dict[str, Any]) -> None:
    """Set each generator to its state."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
