"""How long large arguments and results take: `python -m tests.benchmarks.payloads [--json FILE] [--megabytes M]`.

Each case is one job on a cluster of this machine: `in` has an array as its argument, and `out` returns an array from
each rank. The time is from `run()` to the end of `result()`; the receiver reads the whole array once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

import nbelastic as nbe

ROUNDS = 7


def total(array: np.ndarray) -> float:
    return float(array.sum())


def ones(count: int) -> np.ndarray:
    return np.ones(count)


def measure(workers: int, megabytes: int) -> dict[str, list[float]]:
    """Return the seconds of each round, without the first one, which warms up."""
    count = megabytes * 1_000_000 // 8
    array = np.ones(count)
    found: dict[str, list[float]] = {"in": [], "out": []}
    with nbe.Cluster(f"localhost:{workers}", min=workers, max=workers) as cluster:
        for _ in range(ROUNDS + 1):
            began = time.monotonic()
            assert cluster.run(total, array).result(timeout=300) == [count] * workers
            found["in"].append(time.monotonic() - began)
            began = time.monotonic()
            assert [total(each) for each in cluster.run(ones, count).result(timeout=300)] == [count] * workers
            found["out"].append(time.monotonic() - began)
    return {name: times[1:] for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megabytes", type=int, default=200)
    options = parser.parse_args()
    cases = {}
    for workers in (1, 4):
        for name, times in measure(workers, options.megabytes).items():
            case = f"{options.megabytes} MB {name}, {workers} worker{'s' if workers > 1 else ''}"
            cases[case] = times
            numbers = (min(times), statistics.median(times), max(times))
            print(
                f"{case:24} min {numbers[0]:7.3f}   median {numbers[1]:7.3f}   max {numbers[2]:7.3f}   n={len(times)}"
            )
    if options.json:
        options.json.write_text(json.dumps(cases))


if __name__ == "__main__":
    main()
