"""The generators of random numbers that training draws from: torch's on the CPU and this GPU, Python's, NumPy's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def states() -> dict[str, Any]:
    """Where each stands now."""
    noted: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        noted["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        noted["cuda"] = torch.cuda.get_rng_state()
    return noted


def put(noted: dict[str, Any]) -> None:
    """Make each go on from there."""
    torch.set_rng_state(noted["torch"])
    random.setstate(noted["python"])
    if "numpy" in noted:
        sys.modules["numpy"].random.set_state(noted["numpy"])
    if "cuda" in noted:
        torch.cuda.set_rng_state(noted["cuda"])
