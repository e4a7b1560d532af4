"""The number of GPUs that this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def parse_visible(visible: str | None) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES, each once, up to the first invalid one, as CUDA reads it. None: all GPUs."""
    if visible is None:
        return None
    entries: list[str] = []
    for part in visible.split(","):
        entry = part.strip()
        if not entry.isdecimal() and not entry.startswith(("GPU-", "MIG-")):
            break
        if entry not in entries:
            entries.append(entry)
    return entries


def visible_gpus() -> int:
    """The number of GPUs that this process may use, found without torch or NVML: a kernel loads neither."""
    entries = parse_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if entries is not None:
        return len(entries)
    return len([p for p in Path("/dev").glob("nvidia*") if p.name.removeprefix("nvidia").isdigit()])
