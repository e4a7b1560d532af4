"""How Slurm writes the time that is left for a job."""

from __future__ import annotations

import re

_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")  # squeue's [days-][hours:]minutes:seconds


def seconds_left(text: str) -> float | None:
    """Seconds, from squeue's `%L`; None if it is another text, as `UNLIMITED`."""
    match = _LEFT.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return days * 86400.0 + hours * 3600.0 + minutes * 60.0 + seconds
