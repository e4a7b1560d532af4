"""Draws the state diagrams of docs/how-it-works.md from what `step` does: seeded walks, every transition noted.

`python -m tests.docs.draw_states` prints them; with `--write` it puts them into the page.
"""

from __future__ import annotations

import random
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState, HostPhase, Stage, WorkerState
from nbelastic.core.step import deadline, step
from nbelastic.protocol import events as ev
from nbelastic.protocol.exit_codes import HUNG
from nbelastic.protocol.ids import HostSpec, WorkerId
from tests.core.story import IN_TIME, Story

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"
WALKS, STEPS = 200, 60
END = "[*]"
Edges = dict[tuple[str, str], set[str]]

STAGES = {  # the world's, with the phase that people are shown
    "idle": "no job (waiting)",
    "gathering": "gathering (waiting)",
    "forming": "forming",
    "running": "running",
    "preparing": "preparing (running)",
    "asked": "asked (running)",
    "leaving": "leaving (running)",
    "stopping": "stopping",
    "finished": "finished",
}
GROUPS = {
    "a death": {"WorkerExited", "WorkerFrozen", "AgentLost"},
    "an order": {"HostAdded", "HostRemoved", "HostsDiscovered", "Scaled"},
}


def stage_of(cluster: ClusterState) -> str:
    """Its stage; without a job, or at its end, its phase."""
    if cluster.stopping:
        return cluster.phase
    return str(cluster.stage) if cluster.active else "idle"


class Seen:
    """The transitions noted so far, of workers and of the world: (from, to) -> what caused them."""

    def __init__(self) -> None:
        self.workers: Edges = defaultdict(set)
        self.stages: Edges = defaultdict(set)
        self.tried: set[object] = set()  # situations in which everything has been tried

    def note(
        self, before: ClusterState, event: ev.Event, cluster: ClusterState, commands: tuple[cmd.Command, ...]
    ) -> None:
        name = type(event).__name__
        old, new = stage_of(before), stage_of(cluster)
        if old != new:
            self.stages[old, new].add(name)
        for w in before.workers.keys() | cluster.workers.keys():
            old = str(before.workers[w].state) if w in before.workers else END
            new = str(cluster.workers[w].state) if w in cluster.workers else END
            if old != new:
                order = "" if new == END else _order(w, commands)
                self.workers[old, new].add(order or name)

    def try_all(self, cluster: ClusterState, now: float) -> None:
        """Note what each possible event would cause now; `step` is pure, so nothing changes."""
        counts = (
            cluster.members,
            cluster.awaiting,
            cluster.newcomers,
            cluster.leaving,
            cluster.starting,
            cluster.stopped,
        )
        job = cluster.active
        situation = (
            stage_of(cluster),
            len(cluster.hosts) > 0,
            *(min(len(ids), 2) for ids in counts),
            job and (job.formed, min(len(job.succeeded), 2), len(job.ended) > 0),
            len(cluster.members) + len(cluster.newcomers) - cluster.limits.min,
            cluster.resets == cluster.limits.reset_limit,
            cluster.reason_until < float("inf"),
            cluster.next_formation is not None,
            cluster.trial is not None,
            len(cluster.failed) > 0,
            any(worker.store for worker in cluster.workers.values()),
            any(host.phase is HostPhase.STARTING for host in cluster.hosts.values()),
        )
        if situation in self.tried:
            return
        self.tried.add(situation)
        for event in _possible(cluster):
            after, commands = step(cluster, event, now)
            self.note(cluster, event, after, commands)
            self._pass_time(after, now)
        self._pass_time(cluster, now)

    def _pass_time(self, cluster: ClusterState, now: float) -> None:
        at = deadline(cluster, now)
        if at != float("inf"):
            self.note(cluster, ev.Ticked(), *step(cluster, ev.Ticked(), at))


def _possible(cluster: ClusterState) -> list[ev.Event]:
    """The events that clients, hosts and processes can cause at any time."""
    spec = HostSpec("a", 1)
    events: list[ev.Event] = [
        *(ev.HostsDiscovered(hosts) for hosts in ((), (spec,))),
        *(ev.Scaled(low, low) for low in (1, 2)),
        ev.HostAdded(spec),
        ev.StopRequested(),
        ev.JobSubmitted("another"),
    ]
    for name, host in cluster.hosts.items():
        if host.phase is HostPhase.STARTING:
            events.append(ev.AgentReady(name, 1))
        events += [ev.HostRemoved(name), ev.HostRemoved(name, now=True), ev.AgentLost(name, "gone")]
    for w, worker in cluster.workers.items():
        if worker.job:
            events += [ev.ProgramEnded(w, worker.job, error) for error in ("", "ValueError: bad")]
        if worker.state is WorkerState.STARTING:
            events.append(ev.WorkerRegistered(w))
        if worker.running_cell:
            events += [ev.SetupEnded(w, worker.running_cell, error) for error in ("", "NameError: x")]
        events += [ev.WorkerExited(w, -9), ev.WorkerFrozen(w, "stopped")]
    if cluster.next_formation is not None:
        events += [
            ev.WorkerPrepared(w, cluster.next_formation.generation, error)
            for w in cluster.next_formation.members
            for error in ("", "no")
        ]
    if cluster.stage is Stage.ASKED:
        events += [ev.LeaveAcknowledged(w, cluster.generation, 1, cluster.ask_number) for w in cluster.awaiting]
    if cluster.active:
        events.append(ev.JobStopRequested(cluster.active.name))
        inside = cluster.awaiting if cluster.stage is Stage.LEAVING else cluster.member_set
        if cluster.stage in (Stage.RUNNING, Stage.PREPARING, Stage.ASKED, Stage.LEAVING):
            events += [ev.WorkerSucceeded(w, cluster.generation) for w in inside - cluster.suspects]
        events += [
            ev.WorkerRaised(w, cluster.generation, intact, "RuntimeError") for w in inside for intact in (False, True)
        ]
    return events


class Watched(Story):
    """A story whose every transition is noted, with the event that caused it."""

    def __init__(self, seen: Seen, **limits) -> None:
        self.seen = seen
        self.raised: set[WorkerId] = set()  # they wait for the end of the job, and answer nothing else
        super().__init__(**limits)

    def send(self, *events: ev.Event) -> tuple[cmd.Command, ...]:
        commands: tuple[cmd.Command, ...] = ()
        for event in events:
            before = self.cluster
            commands = super().send(event)
            self.seen.note(before, event, self.cluster, commands)
            self.seen.try_all(self.cluster, self.now)
        return commands

    def _say(self, w: WorkerId, *events: ev.Event) -> None:
        super()._say(w, *(e for e in events if not (isinstance(e, ev.LeaveAcknowledged) and w in self.raised)))

    def _leave(self, w: WorkerId, commit: int) -> None:
        if w not in self.raised:
            super()._leave(w, commit)

    def _form(self, order: cmd.FormWorld) -> None:
        self.raised.difference_update(order.members)
        super()._form(order)


def _order(w: WorkerId, commands: tuple[cmd.Command, ...]) -> str:
    """The command among these that moves `w`."""
    for command in commands:
        match command:
            case cmd.StartWorker(worker=worker) | cmd.StopWorker(worker=worker) if worker == w:
                return type(command).__name__
            case cmd.FormWorld(members=members) if w in members:
                return type(command).__name__
    return ""


class Walk:
    """One walk: hosts, workers, people and time do what they like; the workers that live are faithful."""

    def __init__(self, seed: int, seen: Seen) -> None:
        self.random = random.Random(seed)
        low = self.random.randint(1, 3)
        self.story = Watched(
            seen,
            min=low,
            max=self.random.choice([None, low, low + 1, low + 2]),
            spares=self.random.randint(0, 1),
            reset_limit=self.random.choice([None, None, 1]),
            cooldown=self.random.choice([(0.0, 0.0), (5.0, 300.0)]),
            elastic_timeout=60.0,
        )
        self.jobs = 0
        self.story.add("a:2").add("b:1")
        self.calm()

    def go(self) -> None:
        actions = [self.hosts, self.people, self.die, self.train, self.end, self.hear, self.hear, self.calm, self.wait]
        if self.random.random() < 0.2:
            actions.append(self.set_up)
        for _ in range(STEPS):
            self.random.choice(actions)()
        self.story.send(ev.StopRequested())
        self.story.quiet(1.0)

    def hosts(self) -> None:
        story, name = self.story, self.random.choice("abc")
        match self.random.randrange(6):
            case 0 | 1:
                story.add(f"{name}:{self.random.randint(1, 3)}")
            case 2:
                story.remove(name, now=self.random.random() < 0.5)
            case 3:
                story.discover(*(f"{host}:{self.random.randint(1, 2)}" for host in "abc" if self.random.random() < 0.6))
            case 4 if story.cluster.hosts:
                story.lose_host(self.random.choice(sorted(story.cluster.hosts)))
            case _:
                low = self.random.randint(1, 3)
                story.scale(low, self.random.choice([None, low, low + 2]))

    def people(self) -> None:
        if self.story.cluster.active is None:
            self.submit()
        elif self.random.random() < 0.2:
            self.story.stop_job(self.story.job.name)

    def set_up(self) -> None:
        self.story.set_up(self.random.choice("xy"), self.random.choice("12"))

    def submit(self) -> None:
        self.jobs += 1
        self.story.submit(f"job-{self.jobs}")

    def die(self) -> None:
        """A process dies or freezes, or its setup cells fail."""
        story = self.story
        if not story.fakes:
            return
        w = self.random.choice(sorted(story.fakes))
        match self.random.randrange(4):
            case 0:
                story._forget(w)
                story.send(ev.WorkerFrozen(w, "stopped"))
            case 1 if any(isinstance(e, ev.SetupEnded) and e.worker == w for e in story.answers):
                version = next(e.version for e in story.answers if isinstance(e, ev.SetupEnded) and e.worker == w)
                story._unsay(w, ev.SetupEnded)
                story.ran[w].pop()
                story.send(ev.SetupEnded(w, version, "NameError: x"))
            case 2 if story.fakes[w].job and w not in story.cluster.member_set:
                story.ended(str(w), error="ValueError: bad")
            case _:
                story.kill(str(w), code=self.random.choice([-9, 1, HUNG]))

    def train(self) -> None:
        """Commits; or the function raises or returns somewhere."""
        story = self.story
        if self.random.random() < 0.5 and story.cluster.stage in (Stage.RUNNING, Stage.PREPARING):
            story.commit(self.random.randint(1, 5))
        inside = self._inside()
        if not inside:
            return
        w = self.random.choice(inside)
        match self.random.randrange(4):
            case 0 | 1:
                story._unsay(w, ev.LeaveAcknowledged, ev.WorkerReady)
                fake = story.fakes[w]
                fake.generation = fake.generation or fake.left
                story.raised.add(w)
                story.send(ev.WorkerRaised(w, fake.generation, self.random.random() < 0.3, "RuntimeError: lost"))
            case 2:
                story.ended(str(w), error="ValueError: bad")
            case 3:
                for other in inside if self.random.random() < 0.5 else [w]:
                    story.returned(str(other))

    def end(self) -> None:
        """Programs whose function has returned end."""
        fakes = self.story.fakes
        for w in sorted(w for w, fake in fakes.items() if fake.returned and fake.job):
            if w in fakes and fakes[w].job:
                self.story.ended(str(w))

    def hear(self) -> None:
        """All answers arrive, or all but the last, or one: each one's own words in their order."""
        story = self.story
        match self.random.randrange(3):
            case 0:
                story.answer()
            case 1:
                while len(story.answers) > 1:
                    story.send(story.answers.pop(0))
            case _ if story.answers:
                firsts: dict[object, ev.Event] = {}
                for answer in story.answers:
                    firsts.setdefault(getattr(answer, "worker", getattr(answer, "host", "")), answer)
                answer = self.random.choice(list(firsts.values()))
                story.answers.remove(answer)
                story.send(answer)

    def wait(self) -> None:
        self.story.wait(self.random.choice([IN_TIME, 0.5, 1.0, 1.0, 5.0, 70.0]))

    def calm(self) -> None:
        """For once everything goes well for some seconds, on hosts whose failures are cleared."""
        story = self.story
        for name, host in list(story.cluster.hosts.items()):
            if host.phase is not HostPhase.DRAINING:
                story.add(f"{name}:{host.spec.slots}")
        if story.cluster.active is None:
            self.submit()
        story.quiet(2.0)
        if story.cluster.stage is Stage.RUNNING:
            story.commit(self.random.randint(1, 3)).answer()

    def _inside(self) -> list[WorkerId]:
        """Those that are in the function, in a generation that they have formed."""
        story = self.story
        forming = {e.worker for e in story.answers if isinstance(e, ev.WorkerFormed)}
        leaving = {e.worker for e in story.answers if isinstance(e, ev.WorkerReady)}
        leaving = leaving & story.cluster.member_set if story.cluster.stage is Stage.LEAVING else set()
        there = {w for w, fake in story.fakes.items() if fake.generation} | leaving
        return sorted(w for w in there - forming - story.raised if not story.fakes[w].returned)


def explore(walks: int = WALKS) -> Seen:
    """Everything that was seen to happen in `walks` walks."""
    seen = Seen()
    for seed in range(walks):
        Walk(seed, seen).go()
    return seen


@cache
def diagrams() -> tuple[str, str]:
    """The two Mermaid diagrams: of a worker, and of the world."""
    seen = explore()
    titles = [f'    state "{text}" as {stage}' for stage, text in STAGES.items() if text != stage]
    start = ["    [*] --> idle: start"]
    end = ["    finished --> [*]"]
    return _mermaid(list(WorkerState), [], seen.workers, []), _mermaid(list(STAGES), titles + start, seen.stages, end)


def _mermaid(states: list[str], head: list[str], edges: Edges, tail: list[str]) -> str:
    order = [END, *states]
    pairs = sorted(edges, key=lambda pair: (order.index(pair[0]), pair[1] == END, order.index(pair[1])))
    lines = [f"    {old} --> {new}: {_label(edges[old, new])}" for old, new in pairs]
    return "\n".join(["stateDiagram-v2", *head, *lines, *tail])


def _label(causes: set[str]) -> str:
    """Causes in one line; groups whose every member is among them go by their own name."""
    names = []
    for group, members in GROUPS.items():
        if members <= causes:
            causes = causes - members
            names.append(group)
    return ", ".join(names + sorted(causes))


def drawn(page: str) -> list[str]:
    """The Mermaid diagrams that a page holds."""
    return [block.strip() for block in re.findall(r"```mermaid\n(stateDiagram.*?)```", page, re.DOTALL)]


def redraw(page: str) -> str:
    """The page with its diagrams replaced by those of the code."""
    for old, new in zip(drawn(page), diagrams(), strict=True):
        page = page.replace(old, new)
    return page


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(redraw(PAGE.read_text()))
    else:
        print("\n\n".join(diagrams()))
