"""Published schedules of failures, replayed on real processes: `python -m tests.benchmarks.replay --trace torchft-15s`.

nbelastic, torchrun (a checkpoint every 20 steps) and torchft train the same model on the same machine, one after the
other. Each replays the same schedule: nodes leave with SIGKILL and without warning, and new ones join.
`outcome.py` defines the figures. `--draw FILE… --chart FILE` makes the page's table and chart from the files of `--json`.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.running import private_network, started
from tests.benchmarks.recovery import show, steps_in
from tests.benchmarks.traces import schedules
from tests.benchmarks.traces.chart import chart, table
from tests.benchmarks.traces.outcome import outcome
from tests.benchmarks.traces.schedules import Counts, Schedule
from tests.benchmarks.versus_torchrun import System, environment_of, systems, wait_for, why_not

FILES: dict[str, tuple[str, Callable[[str], Counts]]] = {
    "bamboo-g4dn": ("bamboo-g4dn.csv", schedules.bamboo_counts),
    "parcae-hh": ("parcae-hh.txt", schedules.parcae_counts),
}
SPEED = 20.0  # the default for recorded traces; rates are replayed as they were published
Values = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Plan:
    """How a trace is replayed."""

    workers: int
    minimum: int
    seconds: float
    speed: float | None
    seed: int


def schedule_of(trace: str, plan: Plan) -> Schedule:
    """Return the schedule of a trace by its name."""
    options: dict[str, Any] = {"workers": plan.workers, "seconds": plan.seconds, "seed": plan.seed}
    if trace in FILES:
        name, counts_of = FILES[trace]
        text = (Path(schedules.__file__).parent / name).read_text()
        return schedules.from_counts(counts_of(text), speed=plan.speed or SPEED, **options)
    return schedules.from_rate(schedules.PERIODS[trace], speed=plan.speed or 1.0, **options)


def chosen_systems(names: list[str], torchft_python: str, every_interface: bool) -> list[System]:
    """Return the named systems that can run here, with the commands that obey orders; print why others cannot."""
    modules = {"nbelastic": "our_nodes", "torchrun": "torchrun_nodes", "torchft": "torchft_nodes"}
    found = []
    for name, system in systems(torchft_python).items():
        python = torchft_python if name == "torchft" else sys.executable
        if name not in names:
            continue
        if why := why_not(system, every_interface):
            print(f"{name}: skipped: {why}", flush=True)
            continue
        command = (python, "-m", f"tests.benchmarks.peers.{modules[name]}")
        found.append(System(name, command, environment=system.environment))
    return found


def replay(system: System, schedule: Schedule, minimum: int) -> dict[str, float]:
    """Start the system with all nodes, replay the schedule from its first steps on, and return the outcome."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*system.command, folder, str(schedule.workers), str(minimum)]
        with started(command, system.environment, stdin=subprocess.PIPE) as process:
            whole = f"{system.name} starts"
            wait_for(lambda: next((s for s in steps_in(folder) if s["world"] == schedule.workers), None), whole)
            time.sleep(2)  # the first steps are slower
            begin = time.time()
            assert process.stdin is not None
            for change in schedule.changes:
                time.sleep(max(0.0, begin + change.at - time.time()))
                process.stdin.write(f"{change.kind} {change.node}\n".encode())
                process.stdin.flush()
            time.sleep(max(0.0, begin + schedule.seconds - time.time()))
            if process.poll() is not None:
                raise RuntimeError(f"{system.name} has ended with {process.returncode}")
            return outcome(steps_in(folder), begin, begin + schedule.seconds, minimum)


def compare(trace: str, chosen: list[System], plan: Plan, rounds: int) -> dict[str, Any]:
    """Replay one trace with all systems, in turn; a later round has the next seed."""
    values: Values = {system.name: {} for system in chosen}
    failed: dict[str, list[str]] = {system.name: [] for system in chosen}
    below, load = [], []
    for number in range(rounds):
        schedule = schedule_of(trace, Plan(plan.workers, plan.minimum, plan.seconds, plan.speed, plan.seed + number))
        below.append(schedule.seconds_below(plan.minimum))
        print(f"{trace}, round {number + 1}: {describe(schedule, plan.minimum)}", flush=True)
        for system in chosen:
            try:
                found = replay(system, schedule, plan.minimum)
            except (TimeoutError, RuntimeError, BrokenPipeError) as error:
                failed[system.name].append(str(error))
                print(f"{system.name:10} failed: {error}", flush=True)
                continue
            for name, value in found.items():
                values[system.name].setdefault(name, []).append(value)
            load.append(os.getloadavg()[0])
            print(f"{system.name:10} " + "   ".join(f"{k} {v:.1f}" for k, v in found.items()), flush=True)
    return {"values": values, "failed": failed, "schedule below min, s": below, "load": load, "plan": vars(plan)}


def describe(schedule: Schedule, minimum: int) -> str:
    kinds = [change.kind for change in schedule.changes]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("kill", "leave", "join") if kind in kinds)
    below = schedule.seconds_below(minimum)
    return f"{counted or 'no change'} in {schedule.seconds:.0f} s, {below:.1f} s of it with fewer than {minimum} nodes"


def draw(files: list[Path], picture: Path | None) -> None:
    """Print the table of these result files, later ones over earlier ones, and draw their chart."""
    merged: dict[str, Values] = {}
    for file in files:
        merged |= {trace: found["values"] for trace, found in json.loads(file.read_text())["traces"].items()}
    print(table(merged))
    if picture:
        picture.write_text(chart(merged))


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    names = [*FILES, *schedules.PERIODS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs="+", default=names, choices=names, help="default: all")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long each system replays each trace")
    parser.add_argument("--speed", type=float, help=f"divide the trace's time by this: {SPEED:.0f}, and 1 for rates")
    parser.add_argument("--workers", type=int, default=4, help="local workers; each stands for its share of the nodes")
    parser.add_argument("--min", type=int, default=2, help="fewer workers than this do not train")
    parser.add_argument("--seed", type=int, default=1, help="draws the nodes that leave or are killed")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--systems", nargs="+", default=["nbelastic", "torchrun", "torchft"])
    parser.add_argument("--torchft", default=sys.executable, metavar="PYTHON", help="a Python that has torchft-nightly")
    parser.add_argument("--every-interface", action="store_true", help="let the peers listen where others reach them")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    parser.add_argument("--draw", nargs="+", type=Path, metavar="JSON", help="replay nothing; print the table of these")
    parser.add_argument("--chart", type=Path, help="with --draw: write the chart to this file (SVG)")
    options = parser.parse_args(arguments)
    if not 1 <= options.min <= options.workers:
        parser.error(f"--min {options.min} must be between 1 and --workers {options.workers}")
    if options.minutes <= 0 or (options.speed is not None and options.speed <= 0):
        parser.error("--minutes and --speed must be greater than 0")
    if options.chart and not options.draw:
        parser.error("--chart needs --draw with the files of --json")
    return options


def main() -> None:
    options = options_of()
    if options.draw:
        draw(options.draw, options.chart)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the systems are ended too
    chosen = chosen_systems(options.systems, options.torchft, options.every_interface)
    plan = Plan(options.workers, options.min, options.minutes * 60, options.speed, options.seed)
    setup = environment_of(chosen) | {"workers": plan.workers, "date": dt.datetime.now(dt.UTC).date().isoformat()}
    setup["private network"] = bool(private_network())
    print(*(f"{name} {value}" for name, value in setup.items()), sep=", ", flush=True)
    results: dict[str, Any] = {}
    for trace in options.trace:
        results[trace] = compare(trace, chosen, plan, options.rounds)
        if options.json:  # after each trace, because all of them take long
            options.json.write_text(json.dumps({"setup": setup, "traces": results}, indent=1) + "\n")
    for trace, result in results.items():
        for system, found in result["values"].items():
            show(f"{trace} {system}", found)
    print(table({trace: result["values"] for trace, result in results.items()}))


if __name__ == "__main__":
    main()
