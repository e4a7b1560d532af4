"""nbelastic compared with torchrun and torchft: `python -m tests.benchmarks.versus_torchrun [--json FILE] [--quick]`.

All train the same model with the same faults, interleaved: a round is a fresh start of each system, a time without
faults, then kills. The same code measures all, from files with one line per step that a process completes:

- `start`: from starting the command in a fresh interpreter to the first step of a world of full size.
- `steps/s`: without faults at full size. nbelastic commits every step; torchrun's script saves a checkpoint every 20.
- `kill: next`: from SIGKILL of a random rank (0 every fourth time) to the first step of a world formed after it.
  Such a world is smaller, or has a process that had completed no step before the kill.
- `kill: full`: from the kill to the first step at full size, if every member of that world completes steps.
- `kill: lost`: steps done before the kill that were done again, by step number.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.benchmarks.peers.running import private_network, started
from tests.benchmarks.recovery import N, Steps, show, steps_in

PATIENCE = 90.0  # seconds; a system without a next step by then has failed
LOOK = 0.25  # seconds between two reads of the files, because reading takes time from the two cores
CASES = ("start", "undisturbed", "kill")
Values = dict[str, list[float]]
T = TypeVar("T")


@dataclass(frozen=True)
class System:
    """A system to compare; its files' folder follows `command`, and then, if `counted`, the number of workers."""

    name: str
    command: tuple[str, ...]
    counted: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    def arguments(self, folder: str) -> list[str]:
        return [*self.command, folder, *([str(N)] if self.counted else [])]


@dataclass(frozen=True)
class Kill:
    at: float
    pid: int


@dataclass(frozen=True)
class Plan:
    rounds: int
    kills: int
    undisturbed: float
    cases: tuple[str, ...]


def systems(torchft_python: str) -> dict[str, System]:
    torchrun = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(N), "--max-restarts", "100", "--monitor-interval", "0.1"),
        *("-m", "tests.benchmarks.peers.plain_ddp"),
    )
    # By default all restarts share one store: gloo ranks find addresses of dead ranks, and torchrun survives no kill.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    found = [
        System("nbelastic", (sys.executable, "-m", "tests.benchmarks.peers.ours")),
        System("torchrun", torchrun, counted=False, environment=own_store),
        System("torchft", (torchft_python, "-m", "tests.benchmarks.peers.torchft_group")),
    ]
    return {system.name: system for system in found}


def why_not(system: System, every_interface: bool) -> str | None:
    """Return why this system cannot be run here."""
    if system.name == "nbelastic":
        return None
    if not private_network() and not every_interface:
        return "it listens on every interface, and a private network (unshare, ip) cannot be had; see --every-interface"
    if system.name == "torchft":
        python = system.command[0]
        done = subprocess.run([python, "-c", "import torchft"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"{python} cannot import it ({(done.stderr.strip().splitlines() or ['?'])[-1]}); see --torchft"
    return None


def wait_for(look: Callable[[], T | None], what: str) -> T:
    end = time.monotonic() + PATIENCE
    while (found := look()) is None:
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {PATIENCE:.0f} s")
        time.sleep(LOOK)
    return found


def members(steps: Steps, now: float) -> dict[int, int] | None:
    """Return rank to pid of the world that trains, if it has full size: N processes with a step in the last second."""
    last = {step["pid"]: step for step in steps if step["t"] > now - 1}
    found = {step["rank"]: pid for pid, step in last.items() if step["world"] == N}
    return found if len(found) == len(last) == N else None


def after_kill(steps: Steps, kill: Kill) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the first step of a world formed after the kill, and the first at full size; None if one is missing.

    A survivor may complete a step of the old world that was under way at the kill: that step does not count.
    """
    before = {step["pid"] for step in steps if step["t"] <= kill.at}
    later = [step for step in steps if step["t"] > kill.at and step["pid"] != kill.pid]
    after = next((step for step in later if step["world"] < N or step["pid"] not in before), None)
    if after is None:
        return None
    full = [step for step in later if step["t"] >= after["t"] and step["world"] == N]
    pids = {step["pid"] for step in full}
    if len(pids) < N or pids <= before:
        return None
    return after, full[0]


def lost(steps: Steps, after: dict[str, Any]) -> float:
    """Count the steps that were completed before the new world's first step and done again."""
    reached = max(step["step"] for step in steps if step["t"] < after["t"])
    return float(max(0, reached - (after["step"] - 1)))


def kill_one(folder: str, rank_0: bool) -> Kill:
    """Kill a member that has just completed a step; it has ended when this returns."""
    by_rank = wait_for(lambda: members(steps_in(folder), time.time()), "a world of full size")
    victim = psutil.Process(by_rank[0] if rank_0 else random.choice(list(by_rank.values())))
    kill = Kill(time.time(), victim.pid)
    victim.send_signal(signal.SIGKILL)
    victim.wait(timeout=10)
    return kill


def one_round(system: System, plan: Plan, found: Values) -> None:
    """Start the system, measure it without faults and with kills, and end it; `found` keeps a failed round's values."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        with started(system.arguments(folder), system.environment):
            first = wait_for(
                lambda: next((step for step in steps_in(folder) if step["world"] == N), None), f"{system.name} starts"
            )
            if (began_file := Path(folder) / "began").exists():  # its service had to be started first
                began = float(began_file.read_text())
            found["start"] = [first["t"] - began]
            if "undisturbed" in plan.cases:
                found["steps/s"] = [undisturbed(folder, plan.undisturbed)]
            if "kill" in plan.cases:
                found |= {"kill: next": [], "kill: full": [], "kill: lost": []}
                for number in range(plan.kills):
                    time.sleep(1 + random.random())  # at any moment between two checkpoints
                    kill_once(system, folder, number % 4 == 0, found)


def undisturbed(folder: str, seconds: float) -> float:
    wait_for(lambda: members(steps_in(folder), time.time()), "a world of full size")
    time.sleep(1)  # the first steps are slower
    begin = time.time()
    time.sleep(seconds)
    done = {step["step"] for step in steps_in(folder) if begin < step["t"] <= begin + seconds}
    return len(done) / seconds


def kill_once(system: System, folder: str, rank_0: bool, found: Values) -> None:
    kill = kill_one(folder, rank_0)
    after, full = wait_for(lambda: after_kill(steps_in(folder), kill), f"{system.name} goes on after a kill")
    steps = steps_in(folder)
    if any(step["t"] > kill.at + LOOK for step in steps if step["pid"] == kill.pid):
        raise RuntimeError(f"{system.name}: {kill.pid} was killed and went on")
    found["kill: next"].append(after["t"] - kill.at)
    found["kill: full"].append(full["t"] - kill.at)
    found["kill: lost"].append(lost(steps, after))


def compare(chosen: list[System], plan: Plan) -> tuple[dict[str, Values], dict[str, list[str]]]:
    """Run all rounds, one system after the other in each; return the values, and the failures of each system."""
    values: dict[str, Values] = {system.name: {} for system in chosen}
    failed: dict[str, list[str]] = {system.name: [] for system in chosen}
    for number in range(plan.rounds):
        for system in chosen:
            found: Values = {}
            try:
                one_round(system, plan, found)
            except TimeoutError as error:
                failed[system.name].append(str(error))
                print(f"round {number + 1} {error}", flush=True)
            found = {name: some for name, some in found.items() if some}
            for name, some in found.items():
                values[system.name].setdefault(name, []).extend(some)
            middle = "   ".join(f"{name} {statistics.median(some):.3f}" for name, some in found.items())
            print(f"round {number + 1} {system.name:10} {middle}", flush=True)
    return values, failed


def ratios(values: dict[str, Values]) -> dict[str, float]:
    """Return ratios of medians, the other system's to nbelastic's (steps/s inverted): above 1 nbelastic is faster."""
    ours, found = values["nbelastic"], {}
    for name, peer in values.items():
        for case in ours if name != "nbelastic" else ():
            if case != "kill: lost" and case in peer:
                mine, theirs = statistics.median(ours[case]), statistics.median(peer[case])
                found[f"{case} against {name}"] = mine / theirs if case == "steps/s" else theirs / mine
    return found


def environment_of(chosen: list[System]) -> dict[str, Any]:
    """Return what was compared, and where."""
    versions = {"torch": importlib.metadata.version("torch"), "python": sys.version.split()[0]}
    if torchft := next((system for system in chosen if system.name == "torchft"), None):
        code = "from importlib.metadata import version as v; print(v('torchft-nightly'), 'with torch', v('torch'))"
        done = subprocess.run([torchft.command[0], "-c", code], capture_output=True, text=True, check=False)
        versions["torchft-nightly"] = done.stdout.strip()
    return {"workers": N, "cores": os.cpu_count(), **versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all values to this file")
    parser.add_argument("--quick", action="store_true", help="one round with two kills")
    parser.add_argument("--only", nargs="*", default=[], choices=CASES, help="only these cases")
    parser.add_argument("--peers", nargs="*", default=["torchrun", "torchft"], choices=["torchrun", "torchft"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torchft", default=sys.executable, metavar="PYTHON", help="a Python that has torchft-nightly")
    parser.add_argument("--every-interface", action="store_true", help="let the peers listen where others reach them")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the systems are ended too
    cases = tuple(options.only) or CASES
    plan = Plan(1, 2, 3.0, cases) if options.quick else Plan(options.rounds, 4, 5.0, cases)
    chosen = []
    for system in systems(options.torchft).values():
        if system.name != "nbelastic" and system.name not in options.peers:
            continue
        if why := why_not(system, options.every_interface):
            print(f"{system.name}: skipped: {why}")
        else:
            chosen.append(system)
    setup = environment_of(chosen)
    print(*(f"{name} {value}" for name, value in setup.items()), sep=", ", flush=True)
    values, failed = compare(chosen, plan)
    for name, found in values.items():
        show(name, found)
        if failed[name]:
            print(f"{name:12} failed in {len(failed[name])} of {plan.rounds} rounds: {'; '.join(failed[name])}")
    ratio = ratios(values)
    for name, value in ratio.items():
        print(f"{name:28} {value:8.1f} times")
    if options.json:
        everything = {"setup": setup, "values": values, "failed": failed, "ratios": ratio}
        options.json.write_text(json.dumps(everything, indent=1) + "\n")
    if failed["nbelastic"]:
        raise SystemExit("nbelastic failed")


if __name__ == "__main__":
    main()
