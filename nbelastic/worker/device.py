"""The device of a worker."""

from __future__ import annotations

import torch


def device() -> torch.device:
    """The GPU that the driver has allotted to this worker, the only one that it sees; without a GPU the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
