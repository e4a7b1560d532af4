"""What the driver does with many workers: `python -m tests.benchmarks.scale [--json FILE] [--workers N] [--rate R]`.

Driver, link and core are the real ones, in a separate process. Two other processes simulate agents and workers: each
agent has its own CURVE connection and the project's relay, each worker the project's delivery. There are no engines
and no process groups.

The cases: `start` lasts until all workers are ready, `form` until a job's world runs, and `steady` counts reports of
all workers. In `storm` one worker dies and all others raise. In `stop` the driver's process is stopped (SIGSTOP) for
4 s, and a worker sends an event before it continues. `caught up` is the time from SIGCONT until the driver has handled
that event and all events before it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.scale_driver import SLOTS, drive
from tests.benchmarks.scale_peers import play

PLAYERS = 2  # processes
STOPPED = 4.0  # seconds
PATIENCE = 120.0  # seconds for each case
Numbers = dict[str, list[float]]


class Look(NamedTuple):
    """What the driver answers. `ready`: workers before the job; `cpu`: seconds of its process, and `thread` of its thread."""

    phase: str
    ready: int
    members: int
    generation: int
    cpu: float
    thread: float


class Scale:
    """The processes of the benchmark, and the requests to them."""

    def __init__(self, workers: int, rate: float) -> None:
        context = mp.get_context("spawn")
        self.size = workers // SLOTS * SLOTS
        pipes = [context.Pipe() for _ in range(PLAYERS)]  # from the driver to the players
        lines = [context.Pipe() for _ in range(PLAYERS + 1)]  # from this process to the driver and the players
        self._players = [ours for ours, _ in lines[1:]]
        self._driver = lines[0][0]
        theirs = [there for _, there in lines]
        self.process = context.Process(
            target=drive, args=(workers // SLOTS, theirs[0], [here for here, _ in pipes]), daemon=True
        )
        self._processes = [self.process]
        for (_, orders), parent in zip(pipes, theirs[1:], strict=True):
            self._processes.append(context.Process(target=play, args=(orders, parent, rate), daemon=True))
        self.began = time.monotonic()
        for process in self._processes:
            process.start()
        self.taken: list[tuple[float, float]] = []  # of each StoreOffered: time, CPU seconds of the driver's thread

    def close(self) -> None:
        for process in reversed(self._processes):  # the driver last: the players would report its loss
            process.kill()
            process.join()

    def look(self) -> Look:
        self._driver.send("look")
        *found, taken = self._driver.recv()
        self.taken += taken
        return Look(*found)

    def members(self) -> list[str]:
        """Return the members by rank."""
        self._driver.send("members")
        return list(self._driver.recv())

    def is_whole(self, found: Look) -> bool:
        """Return whether a world of all workers runs."""
        return found.phase == "running" and found.members == self.size

    def until(self, what: str, true: Callable[[Look], bool]) -> tuple[float, float]:
        """Wait until this is true; return the time, and the driver's CPU seconds until then."""
        end = time.monotonic() + PATIENCE
        while not true(found := self.look()):
            if time.monotonic() > end:
                self._driver.send("events")
                raise TimeoutError("\n".join([f"{what}: {found} after {PATIENCE:g} s", *self._driver.recv()]))
            time.sleep(max(0.02, self.size / 100_000))  # looking takes time of the driver
        return time.monotonic(), found.cpu

    def submit(self) -> None:
        self._driver.send("submit")

    def send(self, *order: Any) -> None:
        """Send this to all players."""
        for player in self._players:
            player.send(order)

    def counted(self) -> tuple[list[tuple[int, int, int]], int]:
        """Return each living peer's sent, distinct and total messages, and how many messages the driver received."""
        self.send("count")
        found = [player.recv() for player in self._players]
        return [each for counts, _ in found for each in counts], sum(got for _, got in found)


def run(workers: int, rate: float, seconds: float, rounds: int) -> Numbers:
    found: Numbers = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            found.setdefault(name.replace("_", " "), []).append(value)

    scale = Scale(workers, rate)
    try:
        at, cpu = scale.until("all are ready", lambda found: found.ready == scale.size)
        note(start_s=at - scale.began, start_CPU_s=cpu)
        scale.submit()
        began, before = time.monotonic(), cpu
        at, cpu = scale.until("a world of all", scale.is_whole)
        note(form_s=at - began, form_CPU_s=cpu - before)
        for _ in range(rounds):
            (counts, got_before), got_after = scale.counted(), 0
            sent = sum(every for *_, every in counts)
            began, before = time.monotonic(), scale.look().cpu
            time.sleep(seconds)
            cpu, end = scale.look().cpu, time.monotonic()
            counts, got_after = scale.counted()
            note(
                steady_messages_per_s=(sum(every for *_, every in counts) - sent) / (end - began),
                steady_bundles_per_s=(got_after - got_before) / (end - began),
                steady_CPU_percent=100 * (cpu - before) / (end - began),
            )
        for number in range(rounds):
            storm(scale, number, note)
        for _ in range(rounds):
            stop(scale, note)
        counts = [(numbered, newest) for numbered, newest, _ in scale.counted()[0] if newest]
        for numbered, newest in counts:
            note(sent_per_message=numbered / newest)
        note(sent_per_message_on_average=sum(a for a, _ in counts) / sum(b for _, b in counts))
    finally:
        scale.close()
    return found


def storm(scale: Scale, number: int, note: Callable[..., None]) -> None:
    """Kill one worker; all others raise."""
    victim, before = scale.members()[number], scale.look()
    began = time.monotonic()
    scale.send("kill", victim)
    scale.send("storm")
    at, running = scale.until(
        "a world after the storm", lambda found: found.phase == "running" and found.generation > before.generation
    )
    note(storm_running_s=at - began, storm_running_CPU_s=running - before.cpu)
    at, cpu = scale.until("a world of all again", scale.is_whole)
    note(storm_full_s=at - began, storm_CPU_s=cpu - before.cpu)


def stop(scale: Scale, note: Callable[..., None]) -> None:
    """Stop the driver's process; a worker sends an event before the process continues."""
    members, thread_before = scale.members(), scale.look().thread
    pid = scale.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED - 0.5)
    scale.send("event", members[-1])
    time.sleep(0.5)
    scale.taken.clear()
    began = time.monotonic()
    os.kill(pid, signal.SIGCONT)
    scale.until("the event", lambda _: any(at > began for at, _ in scale.taken))
    at, thread = next((at, cpu) for at, cpu in scale.taken if at > began)
    note(stop_caught_up_s=at - began, stop_thread_CPU_s=thread - thread_before)
    scale.until("the same world", scale.is_whole)
    assert sorted(scale.members()) == sorted(members), "a worker was lost without a fault"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--workers", type=int, default=1000, help="in whole hosts of 8")
    parser.add_argument("--rate", type=float, default=4.0, help="reports per second of rank 0; other ranks make one")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each steady measurement")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found = run(options.workers, options.rate, options.seconds, options.rounds)
    print(f"{f'{options.workers} workers, {options.rate:g} reports/s':38}{'min':>10}{'median':>10}{'max':>10}{'n':>7}")
    for name, values in found.items():
        row = (min(values), statistics.median(values), max(values))
        print(f"{name:38}{''.join(f'{value:10.3f}' for value in row)}{len(values):7}")
    if options.json:
        options.json.write_text(json.dumps({"workers": options.workers, "rate": options.rate, **found}, indent=1))


if __name__ == "__main__":
    main()
