"""A time without a driver: what the fakes know is what they report to the next driver."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import msgspec
from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.cluster_snapshot import SavedCluster, snapshot_of
from nbelastic.core.reasons import in_words
from nbelastic.core.state import ClusterState, Stage
from nbelastic.core.step import step
from nbelastic.core.takeover import resume
from nbelastic.protocol import events as ev
from nbelastic.protocol.agent_messages import AgentHello
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.json_encoding import encode
from nbelastic.protocol.worker_messages import WorkerReport
from tests.core.fakes import FakeWorker
from tests.core.invariants import check
from tests.core.story import Story, wid
from tests.support import decisions

ALL = 1_000_000
DISTURBING = (
    cmd.AbortWorld,
    cmd.FormWorld,
    cmd.StopProgram,
    cmd.StopWorker,
    cmd.AskLeave,
    cmd.LeaveAt,
    cmd.RunProgram,
    cmd.StartWorker,
)


def _saved(story: Story) -> SavedCluster:
    """What the next driver reads in the file."""
    return msgspec.json.decode(encode(snapshot_of(story.cluster)), type=SavedCluster)


class Away:
    """The driver is killed while it deals with `last`: that many of its commands, each to one worker, have `reached` them.

    `written`: it had saved the world after `last`, else the one before. `held`: workers that are about to leave their generation as
    agreed, and have not got as far. Messages that the driver has not received are lost.
    """

    def __init__(
        self,
        story: Story,
        last: ev.Event | None = None,
        *,
        reached: int = ALL,
        written: bool = True,
        held: Collection[WorkerId] = (),
    ) -> None:
        self._story = story
        self.saved = _saved(story)
        if last is not None:
            story.note_sent(last)
            story.cluster, commands = step(story.cluster, last, story.now)
            decisions.note(last, commands, in_words(story.cluster.reason, story.now))
            self.saved = _saved(story) if written else self.saved
            for command in list(_one_by_one(commands))[:reached]:
                story._obey(command)
        for w in held:
            story.hold_back(w)
            story.fakes[w].bound = True
        story.answers = []

    # ---- what happens meanwhile ----

    def kill(self, *names: str, noticed: bool = True) -> Away:
        """Processes end; with `noticed`, members that trained with them have lost a connection, and no driver receives that."""
        for name in names:
            generation = self._story.fakes[wid(name)].generation
            self._story._forget(wid(name))
            if noticed and generation:
                self.break_off(generation)
        return self

    def break_off(self, generation: int) -> None:
        for w, fake in self._story.fakes.items():
            waits = fake.bound or fake.returned or isinstance(fake.word, ev.WorkerRaised)
            if fake.job and fake.generation == generation and not waits:
                fake.word = ev.WorkerRaised(w, generation, intact=False, error="RuntimeError: Connection closed")

    def lose_host(self, name: str, *, noticed: bool = True) -> Away:
        generations = {
            fake.generation for w, fake in self._story.fakes.items() if w.host == name and fake.job and fake.generation
        }
        self._story.end_agent(name)
        for generation in generations if noticed else ():
            self.break_off(generation)
        return self

    def form(self) -> Away:
        """Worlds form whose members all have the formation."""
        for members in self._worlds():
            for fake in members:
                fake.formed = fake.holds = True
                fake.since = fake.generation
        return self

    def commit(self, count: int = 1) -> Away:
        """Whole worlds train on."""
        for members in self._worlds():
            if all(fake.formed and fake.word is None and not fake.bound for fake in members):
                for fake in members:
                    fake.commit, fake.steps, fake.begun = fake.commit + count, fake.steps + count, fake.begun + count
        return self

    def raised(self, name: str, error: str = "ValueError: no") -> Away:
        """A member's program raises."""
        fake = self._story.fakes[wid(name)]
        fake.word = ev.WorkerRaised(wid(name), fake.generation, intact=True, error=error)
        return self

    def returned(self, *names: str) -> Away:
        for name in names:
            fake = self._story.fakes[wid(name)]
            fake.returned, fake.word = True, ev.WorkerSucceeded(wid(name), fake.generation)
        return self

    def ended(self, *names: str, error: str = "") -> Away:
        for name in names:
            self._story.end_program(wid(name), error)
        return self

    def _worlds(self) -> list[list[FakeWorker]]:
        by_generation: dict[int, list[FakeWorker]] = {}
        for fake in self._story.fakes.values():
            if fake.job and fake.generation:
                by_generation.setdefault(fake.generation, []).append(fake)
        return [members for members in by_generation.values() if len(members) == members[0].size]

    # ---- a new driver ----

    def new_driver(
        self, *, frozen: Iterable[str] = (), late: Iterable[str] = (), coming: Collection[str] = ()
    ) -> Story:
        """A new driver takes over."""
        story = self._story
        for name in late:  # an agent that does not answer is ended
            story.end_agent(name)
        mute = {wid(name) for name in frozen} | story.silent
        # the order of the answers must not matter
        heard = {w: self._statement(w) for w in reversed(story.fakes) if w not in mute}
        agents = {name: self.hello(name) for name in story.agents if name not in coming}
        story.cluster, commands = resume(self.saved, agents, heard, story.now, coming=coming)
        story.stores |= {w: here.store for w, here in heard.items()}
        story.said.extend(commands)
        decisions.note("takeover", (self.saved, *commands), in_words(story.cluster.reason, story.now))
        for command in commands:
            story._obey(command)
        cluster = story.cluster
        check(ClusterState(cluster.limits, highest_generation=cluster.highest_generation), cluster, commands, story.now)
        for w, here in heard.items():
            if w in story.fakes and here.job == self.saved.job and not here.busy and here.job:
                story._say(w, ev.ProgramEnded(w, *story.fakes[w].ended))
            elif w in story.fakes and not here.busy:  # its engine is known
                story._say(w, ev.WorkerRegistered(w))
        story.answers += [
            ev.WorkerHung(w, fake.numbered, fake.commit)
            for w, fake in story.fakes.items()
            if w in story.stuck and fake.asks
        ]
        story.answers += [ev.WorkerFrozen(w, "stopped") for w in sorted(mute) if w in story.fakes]
        story.answers += [
            ev.AgentReady(name, 1, story.interfaces(name), 4711) for name in coming if name in story.agents
        ]
        return story

    def hello(self, name: str) -> AgentHello:
        story = self._story
        workers = tuple((w, 1000) for w in story.fakes if w.host == name)
        interfaces, home = story.interfaces(name), story.homes.get(name, "")
        newest, gpus = dict(story.agents[name]), story.gpus.get(name, ())
        own = {str(w): story.gpu_of[w] for w, _ in workers if story.gpu_of.get(w)}
        return AgentHello(name, 1, {}, interfaces, 4711, home, workers, newest, gpus=gpus, worker_gpus=own)

    def _statement(self, w: WorkerId) -> WorkerReport:
        story = self._story
        fake = story.fakes[w]
        generation = fake.generation or fake.stands
        return WorkerReport(
            w,
            1000,
            True,
            fake.job or fake.ended[0],
            bool(fake.job),
            fake.left,
            generation,
            fake.rank,
            fake.size,
            fake.formed and bool(generation),
            fake.numbered,
            fake.bound,
            fake.commit,
            fake.holds,
            story.store(w, generation) if fake.offered and generation else "",
            fake.stopped,
            fake.word,
            (),
            fake.since,
        )


def _one_by_one(commands: Iterable[cmd.Command]) -> Iterator[cmd.Command]:
    """Each command for several workers becomes one command per worker."""
    for command in commands:
        match command:
            case cmd.FormWorld(members=members, to=to):
                yield from (replace(command, to=(w,)) for w in to or members)
            case cmd.StopProgram(workers=workers) | cmd.TryProgram(workers=workers):
                yield from (replace(command, workers=(w,)) for w in workers)
            case cmd.PrepareWorld(formation=order):
                yield from (cmd.PrepareWorld(replace(order, to=(w,))) for w in order.members)
            case (
                cmd.DropWorld()
                | cmd.AskLeave()
                | cmd.LeaveAt()
                | cmd.CancelLeave()
                | cmd.AbortWorld()
                | cmd.QueryPosition()
            ):
                yield from (replace(command, members=(w,)) for w in command.members)
            case _:
                yield command


def three(**limits) -> Story:
    """Three workers that train on two hosts, at commit 5."""
    return Story("a:2", "b:1", min=2, cooldown=(0.0, 0.0), **limits).run().commit(5)


def disturbed(story: Story, mark: int) -> list[cmd.Command]:
    return [command for command in story.said[mark:] if isinstance(command, DISTURBING)]


def trains(story: Story, *names: str) -> bool:
    """Whether these workers train, by rank, with all commits."""
    cluster, fakes = story.cluster, story.fakes
    at = {fakes[w].commit for w in cluster.members}
    there = all(fakes[w].generation == cluster.generation and fakes[w].formed for w in cluster.members)
    return cluster.stage is Stage.RUNNING and there and len(at) == 1 and (not names or story.names == list(names))
