"""Random kills, stops, joins and removals while it trains: `python -m tests.benchmarks.chaos [--faults N] [--seed N]`.

At the end every part of every epoch was used exactly once and all ranks hold the same weights. Prints the goodput:
steps a second with faults against steps a second without.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.benchmarks import programs

SAMPLES = 4096


def fault(cluster: nbe.Cluster, dice: random.Random) -> str:
    """Do one thing to the cluster; returns what."""
    ranked = [w for w in cluster.workers if w.rank is not None]
    what = dice.choice(["kill", "kill", "kill two", "stop", "add", "remove"])
    if what in ("kill", "stop", "kill two"):
        sig = signal.SIGSTOP if what == "stop" else signal.SIGKILL
        for victim in dice.sample(ranked, min(2 if what == "kill two" else 1, max(0, len(ranked) - 1))):
            try:
                os.kill(victim.pid, sig)
            except ProcessLookupError:
                continue
    elif what == "add":
        cluster.add_host("127.0.0.2:2")
    elif any(host.name == "127.0.0.2" for host in cluster.hosts):
        cluster.remove_host("127.0.0.2", now=dice.random() < 0.5)
    return what


def used_once(spans: list[Any], epochs: int) -> bool:
    """Whether the steps' parts of each epoch follow one another without gap or overlap, from its first sample to its last."""
    for epoch in range(epochs):
        parts = [(begin, end) for number, begin, end in spans if number == epoch]
        ends = [0, *(end for _, end in parts)]
        if [begin for begin, _ in parts] != ends[:-1] or ends[-1] != SAMPLES:
            return False
    return True


def run(faults: int, seed: int, pause: float) -> dict[str, Any]:
    """Steps a second with `faults` faults, one every `pause` seconds, and whether everything held."""
    dice = random.Random(seed)
    epochs = max(1, int((faults * pause + 2) * 30 * 8 * 4 / SAMPLES))
    with nbe.Cluster("localhost:4", min=1, max=4, cooldown=(0, 0)) as cluster:
        began = time.monotonic()
        job = cluster.run(programs.count_samples, epochs, SAMPLES)
        cluster.wait(4, timeout=30)
        done = []
        while len(done) < faults and not job.done():
            time.sleep(pause * (0.5 + dice.random()))
            done.append(fault(cluster, dice))
        results = job.result(timeout=600)
        took = time.monotonic() - began
    first = results[0]
    return {
        "faults": len(done),
        "steps": first["commits"],
        "seconds": took,
        "goodput": first["commits"] / took,
        "every sample once": used_once(first["spans"], epochs),
        "same weights": all(result["weights"] == first["weights"] for result in results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {
        "undisturbed": run(0, options.seed, options.pause),
        "disturbed": run(options.faults, options.seed, options.pause),
    }
    for name, values in found.items():
        print(name, *(f"{k}: {v:.2f}" if isinstance(v, float) else f"{k}: {v}" for k, v in values.items()), sep="   ")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if not all(values["every sample once"] and values["same weights"] for values in found.values()):
        raise SystemExit("something was lost")


if __name__ == "__main__":
    main()
