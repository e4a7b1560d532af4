"""What a training made of a schedule, from the lines that its processes wrote for each step. Nothing here does I/O."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import pairwise
from typing import Any

STILL = 5.0  # undisturbed steps; a longer time without a new step counts as a standstill


def outcome(steps: list[dict[str, Any]], begin: float, end: float, minimum: int) -> dict[str, float]:
    """Return the figures of the time from `begin` to `end`; `steps` are all lines, by time.

    - `goodput, %`: the share of the time that is not standstill. A step that was made before counts as no step, so
      to make lost steps again is a standstill too.
    - `steps lost`: steps that were made again.
    - `below min, s`: standstills of worlds with at least `minimum` ranks.
    - `standstill, s`: the longest time without a new step.
    - `new steps`, `samples`: steps made for the first time, and batches that all ranks of their worlds saw.
    """
    reached = max((step["step"] for step in steps if step["t"] <= begin), default=0)
    new = []
    for step in steps:
        if begin < step["t"] <= end and step["step"] > reached:
            reached = step["step"]
            new.append(step)
    times = [step["t"] for step in new]
    # Worlds of other sizes have other step times, so the usual step is the median of all.
    usual = statistics.median(b - a for a, b in pairwise(times)) if len(times) > 1 else 0.0
    large = [step["t"] for step in new if step["world"] >= minimum]
    return {
        "goodput, %": 100 * (1 - standstill(times, begin, end, usual) / (end - begin)),
        "steps lost": float(repeated([step for step in steps if begin < step["t"] <= end])),
        "below min, s": standstill(large, begin, end, usual),
        "standstill, s": max(b - a for a, b in pairwise([begin, *times, end])),
        "new steps": float(len(new)),
        "samples": float(sum(step["world"] for step in new)),
    }


def standstill(times: list[float], begin: float, end: float, usual: float) -> float:
    """Return the seconds by which long gaps between these times exceed a usual step."""
    gaps = [b - a for a, b in pairwise([begin, *times, end])]
    return sum(gap - usual for gap in gaps if gap > STILL * usual)


def repeated(steps: list[dict[str, Any]]) -> int:
    """Count the steps that a rank has made twice; a step that was made three times counts as two."""
    made = Counter((step["step"], step["rank"]) for step in steps)
    most: dict[int, int] = {}
    for (number, _), count in made.items():
        most[number] = max(most.get(number, 0), count)
    return sum(count - 1 for count in most.values())
