"""`python -m tests.simulation FIRST COUNT`: play so many seeds on all cores, print what fails, and how long it took."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.faults import as_line, draw, play, shrink


def failure(seed: int) -> str:
    """What fails in the schedule of this seed, and its shortest part that fails; empty if nothing does."""

    def error(schedule) -> str:
        try:
            play(seed, schedule)
        except Exception as found:
            return f"{type(found).__name__}: {found}".splitlines()[0]
        return ""

    found = error(draw(seed))
    return f"{found}\n{as_line(seed, shrink(seed, draw(seed), lambda shorter: bool(error(shorter))))}" if found else ""


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    begun, failed = time.monotonic(), 0
    with ProcessPoolExecutor() as pool:
        for seed, found in enumerate(pool.map(failure, range(first, first + count), chunksize=20), first):
            if found:
                failed += 1
                print(f"seed {seed}: {found}", flush=True)
    print(f"{count} seeds of 10 simulated minutes in {time.monotonic() - begun:.0f} s: {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
