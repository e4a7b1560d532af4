"""How long the core takes: `python -m tests.benchmarks.core [--json PATH] [--workers N …]`.

A cluster with 8 workers per host starts, forms a world, trains while events arrive, loses workers and hosts, grows and
shrinks. Every event's step is timed, and each kind of formation separately.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState, Stage
from nbelastic.core.step import step
from nbelastic.protocol import events as ev
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.ids import HostSpec, WorkerId

SLOTS = 8
SPARES = 64


class Cluster:
    """A cluster state and the time that each event took, by phase."""

    def __init__(self, workers: int, clock: Callable[[], float] = perf_counter) -> None:
        self.size, self.clock = workers, clock
        self.cluster = ClusterState(Limits(min=workers // 2, max=workers, spares=SPARES, elastic_timeout=1e6))
        self.now = 0.0
        self.phase = ""
        self.times: dict[str, list[float]] = defaultdict(list)
        self.forming: list[float] = []

    def send(self, event: ev.Event) -> tuple[cmd.Command, ...]:
        self.now += 1e-4
        start = self.clock()
        state, commands = step(self.cluster, event, self.now)
        took = self.clock() - start
        self.cluster = state
        if any(isinstance(command, cmd.FormWorld) for command in commands):
            self.forming.append(took)
        else:
            self.times[self.phase].append(took)
        return commands

    def ready(self, w: WorkerId, commit: int = 0) -> None:
        self.send(
            ev.WorkerReady(w, "job", self.cluster.workers[w].generation, commit, clean=True, store="tcp://10.0.0.1:1")
        )

    def start(self) -> None:
        self.phase = "start-up"
        hosts = [HostSpec(f"host{number:05d}", SLOTS) for number in range((self.size + SPARES) // SLOTS)]
        self.send(ev.HostsDiscovered(tuple(hosts)))
        for host in hosts:
            for command in self.send(ev.AgentReady(host.name, 1)):
                if isinstance(command, cmd.StartWorker):
                    self.send(ev.WorkerStarted(command.worker, 1))
        for w in list(self.cluster.workers):
            self.send(ev.WorkerRegistered(w))

    def form(self, phase: str) -> None:
        """Bring the cluster from its present state to a running world."""
        self.phase = phase
        for w in sorted(self.cluster.starting) if phase == "first world" else sorted(self.cluster.awaiting):
            self.rejoin(w)
        self.now += 2.0
        self.send(ev.Ticked())
        self.phase = "joining"
        for w in self.cluster.members:
            self.send(ev.WorkerFormed(w, self.cluster.generation, {}))
        assert self.cluster.stage is Stage.RUNNING, self.cluster.reason

    def rejoin(self, w: WorkerId) -> None:
        member = w in self.cluster.member_set
        left = self.cluster.generation if member else 0
        self.send(ev.WorkerReady(w, "job", left, 100, clean=True, store="tcp://10.0.0.1:1", holds_state=member))

    def train(self, events: int) -> None:
        """Send events that change nothing to a running world with spares."""
        self.phase = "running"
        spares = sorted(self.cluster.newcomers)
        assert spares, "the spares are waiting"
        for number in range(events):
            self.send(ev.WorkerStarted(self.cluster.members[number % len(self.cluster.members)], 2))
            w = spares[number % len(spares)]
            self.send(ev.WorkerReady(w, "job", 0, 0, clean=True, store="tcp://10.0.0.1:1"))
            self.send(ev.Ticked())

    def die(self, deaths: int) -> None:
        """Lose workers: the others form the next generation, and the replacements start."""
        victims = self.cluster.members[:: max(1, len(self.cluster.members) // deaths)][:deaths]
        self.phase = "death"
        for w in victims:
            self.send(ev.WorkerExited(w, -9))
        self.form("gathering")

    def lose_host(self) -> None:
        self.phase = "host lost"
        self.send(ev.AgentLost(self.cluster.members[0].host, "gone"))
        self.form("gathering")

    def shrink(self) -> None:
        """Drain a host: ask, agree, leave, form."""
        self.phase = "planned change"
        self.send(ev.HostRemoved(self.cluster.members[-1].host))
        self.now += 2.0
        self.send(ev.Ticked())
        for w in self.cluster.members:
            self.send(ev.LeaveAcknowledged(w, self.cluster.generation, 5, self.cluster.ask_number))
        assert self.cluster.stage is Stage.LEAVING
        self.form("planned change")

    def prepare(self) -> None:
        """Drain a host with a world that is prepared: the members enter it as they leave the present one."""
        self.phase = "prepared change"
        first, generation = self.cluster.members[0], self.cluster.generation
        self.send(ev.StoreOffered(first, generation, "tcp://10.0.0.1:2"))
        self.send(ev.HostRemoved(self.cluster.members[-1].host))
        self.now += 2.0
        self.send(ev.Ticked())
        assert self.cluster.next_formation is not None
        prepared = self.cluster.next_formation
        for w in prepared.members:
            self.send(ev.WorkerPrepared(w, prepared.generation))
        for w in self.cluster.members:
            self.send(ev.LeaveAcknowledged(w, generation, 5, self.cluster.ask_number))
        assert self.cluster.stage is Stage.LEAVING
        leavers = self.cluster.members
        for w in prepared.members:
            self.send(ev.WorkerFormed(w, prepared.generation, {}))
        for w in leavers:
            self.rejoin(w)
        assert self.cluster.stage is Stage.RUNNING, self.cluster.reason

    def finish(self) -> None:
        """The function returns on all ranks, and then their programs end."""
        self.phase = "finish"
        members = self.cluster.members
        for w in members:
            self.send(ev.WorkerSucceeded(w, self.cluster.generation))
        for w in members:
            self.send(ev.ProgramEnded(w, "job"))
        assert self.cluster.active is None


def day(workers: int, clock: Callable[[], float] = perf_counter) -> Cluster:
    """All phases. `clock`: what the cost of an event is measured with."""
    cluster = Cluster(workers, clock)
    cluster.start()
    cluster.send(ev.JobSubmitted("job"))
    cluster.form("first world")
    cluster.train(min(500, workers))
    cluster.die(min(100, workers // 10))
    cluster.lose_host()
    cluster.shrink()
    cluster.prepare()
    cluster.finish()
    return cluster


def numbers(times: list[float]) -> dict[str, float]:
    """Return the count, and the minimum, median and maximum in milliseconds."""
    ms = [time * 1000 for time in times]
    return {"events": len(ms), "min": min(ms), "median": statistics.median(ms), "max": max(ms)}


def show(name: str, row: dict[str, float]) -> None:
    print(f"{name:26}{row['events']:8.0f}{row['min']:10.4f}{row['median']:10.4f}{row['max']:10.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 1000, 10_000])
    options = parser.parse_args()
    result: dict[str, dict[str, dict[str, float]]] = {}
    for workers in options.workers:
        gc.collect()
        cluster = day(workers)
        every = [time for times in cluster.times.values() for time in times]
        rows = {"every event": numbers(every), "a new assignment": numbers(cluster.forming)}
        rows |= {f"- {phase}": numbers(times) for phase, times in cluster.times.items()}
        result[str(workers)] = rows
        print(f"{f'{workers} workers':26}{'events':>8}{'min ms':>10}{'median':>10}{'max':>10}")
        for name, row in rows.items():
            show(name, row)
        print()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
