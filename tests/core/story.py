"""A cluster played by faithful fakes: agents and workers that do what the core commands, when the story lets them.

A `Story` owns one World. What a faithful agent or worker would answer to a command lies in `answers` until the story
hands it in (`answer()`), so that a test decides in which order things happen. After every step `check` compares the
world, the commands and what the fakes know with what must always hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nbelastic.core import messages as m
from nbelastic.core.membership import deadline, step
from nbelastic.core.placement import parse_host
from nbelastic.core.world import Limits, Stage, WorkerState, World
from tests.core.invariants import check, check_stores

SIGKILL = -9
IN_TIME = 1e-6


@dataclass
class FakeWorker:
    """What a faithful worker knows of itself."""

    job: str = ""
    epoch: int = 0  # the epoch it is in, or 0
    left: int = 0  # the newest epoch it has left or seen aborted
    commit: int = 0  # of its state, since the job's beginning
    steps: int = 0  # commits in this epoch
    clean: bool = True
    returned: bool = False  # from its elastic function
    offered: bool = False  # a store, in this epoch
    begun: int = 0  # collectives, in this epoch
    place: str = "train.py:9 in step"


def wid(text: str) -> m.WorkerId:
    return m.WorkerId.parse(text)


class Story:
    """`Story("a:2", "b:2", min=2, max=4)`: hosts are added by hand and wait to come up."""

    def __init__(self, *hosts: str, **limits) -> None:
        self.world = World(Limits(**limits))
        self.now = 100.0
        self.answers: list[m.Event] = []
        self.said: list[m.Command] = []
        self.heard: list[m.Event] = []
        self.fakes: dict[m.WorkerId, FakeWorker] = {}
        self.silent: set[m.WorkerId] = set()  # they answer nothing
        self.started: set[m.WorkerId] = set()  # every worker ever started
        self.addresses: dict[str, tuple[str, ...]] = {}  # of hosts that have any, in their order of preference
        self.homes: dict[str, str] = {}  # where their workers' stores are
        self.cut: set[tuple[str, str]] = set()  # (host, address): what it does not reach
        self.stores: dict[m.WorkerId, str] = {}  # what each has offered last
        self.prepared: set[int] = set()  # epochs
        self.mute: set[str] = set()  # hosts whose agents answer no probes
        for host in hosts:
            self.add(host)

    # ---- what happens ----

    def send(self, *events: m.Event) -> tuple[m.Command, ...]:
        """Events arrive. Returns the commands of the last one."""
        commands: tuple[m.Command, ...] = ()
        for event in events:
            before = self.world
            self.heard.append(event)
            self.world, commands = step(before, event, self.now)
            self.said.extend(commands)
            for command in commands:
                self._obey(command)
            check(before, self.world, commands, self.now)
            check_stores(self, event, commands)
        return commands

    def answer(self, which: Callable[[m.Event], bool] = lambda _: True, limit: int = 100_000) -> Story:
        """Hand in the fakes' answers, first come first served, until there are none (of those that `which` picks)."""
        for _ in range(limit):
            event = next((answer for answer in self.answers if which(answer)), None)
            if event is None:
                return self
            self.answers.remove(event)
            self.send(event)
        raise AssertionError("the conversation never ends")

    def hear(self, kind: type[m.Event], *workers: str, limit: int = 100_000) -> Story:
        """Hand in the answers of one kind (of these workers only, if named)."""
        names = {wid(w) for w in workers}
        return self.answer(lambda e: isinstance(e, kind) and (not names or e.worker in names), limit)

    def wait(self, seconds: float) -> Story:
        """Time passes; `Ticked` comes at every deadline on the way, as the driver sees to."""
        end = self.now + seconds
        for _ in range(1000):
            at = deadline(self.world, self.now)
            if at > end:
                self.now = end
                return self
            self.now = at
            self.send(m.Ticked())
            assert deadline(self.world, self.now) > self.now, f"a hot loop: {self.world.reason}"
        raise AssertionError("too many ticks")

    def quiet(self, seconds: float = 0.0) -> Story:
        """Everybody answers, time passes, everybody answers."""
        self.answer()
        end = self.now + seconds
        while self.now < end:
            self.wait(max(IN_TIME, min(end, deadline(self.world, self.now)) - self.now))
            self.answer()
        return self

    def add(self, host: str, *addresses: str) -> Story:
        self.addresses |= {host.partition(":")[0]: addresses} if addresses else {}
        self.send(m.HostAdded(parse_host(host, 1), "a test"))
        return self

    def remove(self, name: str, *, now: bool = False) -> Story:
        self.send(m.HostRemoved(name, now, "a test"))
        return self

    def stop_job(self, name: str = "job") -> Story:
        self.send(m.JobStopRequested(name))
        return self

    def discover(self, *hosts: str) -> tuple[m.Command, ...]:
        return self.send(m.HostsDiscovered(tuple(parse_host(host, 1) for host in hosts)))

    def scale(self, low: int, high: int | None) -> Story:
        self.send(m.Scaled(low, high, "a test"))
        return self

    def submit(self, job: str = "job") -> Story:
        self.send(m.JobSubmitted(job))
        return self

    def run(self, job: str = "job") -> Story:
        """From wherever it stands to a world that trains."""
        self.answer()
        self.submit(job).quiet(2.0)
        assert self.world.stage is Stage.RUNNING, self.world.reason
        return self

    def commit(self, count: int = 1) -> Story:
        """Every member makes commits: the job trains."""
        for w, fake in [(w, self.fakes[w]) for w in self.world.members]:
            fake.commit += count
            fake.steps += count
            fake.begun += count
            if fake.steps > 1 and not fake.offered:
                fake.offered = True
                self._say(w, m.StoreOffered(w, fake.epoch, self.store(w, fake.epoch)))
        return self

    def kill(self, *workers: str, code: int = SIGKILL) -> Story:
        """Processes die, and their agent says so."""
        for name in workers:
            w = wid(name)
            self._forget(w)
            self.send(m.WorkerExited(w, code))
        return self

    def lose_host(self, name: str, reason: str = "its machine is gone") -> Story:
        for w in [w for w in self.fakes if w.host == name]:
            self._forget(w)
        self.answers = [e for e in self.answers if getattr(e, "host", "") != name]
        self.send(m.AgentLost(name, reason))
        return self

    def raised(self, worker: str, error: str = "ValueError: no", *, intact: bool = True) -> Story:
        self.send(m.WorkerRaised(wid(worker), self.world.epoch, intact, error))
        return self

    def returned(self, *workers: str) -> Story:
        """The elastic function returns."""
        for name in workers:
            fake = self.fakes[wid(name)]
            fake.returned = True
            self.hold_back(wid(name))
            self.send(m.WorkerSucceeded(wid(name), fake.epoch))
        return self

    def stand_still(self, seconds: float = 3.0, times: int = 1) -> Story:
        """The driver says that nobody commits, every second; who is asked answers."""
        for number in range(times):
            self.send(m.StoodStill(self.world.epoch, seconds + number))
            self.answer(lambda e: isinstance(e, m.WorkerAt | m.Probed))
        return self

    def hold_back(self, w: m.WorkerId) -> None:
        """If it was about to say that it has left its epoch, it has not got as far as that commit."""
        fake = self.fakes[w]
        if any(isinstance(e, m.WorkerReady) and e.worker == w for e in self.answers) or not fake.epoch:
            fake.epoch = fake.left
            self._unsay(w, m.WorkerReady, m.WorkerFormed)
        self._unsay(w, m.WorkerOffered)

    def ended(self, *workers: str, error: str = "") -> Story:
        """The program ends."""
        for name in workers:
            fake = self.fakes[wid(name)]
            job, fake.job, fake.epoch = fake.job, "", 0
            self._unsay(wid(name), m.WorkerReady, m.WorkerFormed, m.WorkerOffered, m.ProgramEnded)
            self.send(m.ProgramEnded(wid(name), job, error))
        return self

    def finish(self) -> Story:
        """All ranks return and end."""
        members = self.names
        self.returned(*members)
        self.ended(*members)
        return self

    # ---- what is ----

    @property
    def names(self) -> list[str]:
        return [str(w) for w in self.world.members]

    @property
    def job(self):
        assert self.world.job is not None
        return self.world.job

    def commands(self, kind: type, since: int = 0) -> list:
        return [command for command in self.said[since:] if isinstance(command, kind)]

    def last(self, kind: type):
        found = self.commands(kind)
        assert found, f"no {kind.__name__} was commanded"
        return found[-1]

    def records(self, kind: str) -> list[str]:
        return [command.text for command in self.commands(m.Record) if command.kind == kind]

    def alive(self, host: str = "") -> list[str]:
        workers = self.world.workers.values()
        return [str(w.id) for w in workers if w.state is not WorkerState.STOPPED and w.id.host.startswith(host)]

    def mark(self) -> int:
        return len(self.said)  # to ask later what was commanded since

    # ---- the fakes ----

    def _obey(self, command: m.Command) -> None:
        match command:
            case m.StartAgent(host=host):
                self.answers.append(self._hello(host.name))
            case m.Probe(host=prober, target=target, addresses=tried, number=number):
                reached = tuple(address for address in tried if (prober, address) not in self.cut)
                self.answers += [m.Probed(prober, target, reached, number)] if prober not in self.mute else []
            case m.Rehome(host=name, address=address):
                self._rehome(name, address)
            case m.Look(epoch=epoch, members=members):
                for w, fake in [(w, self.fakes[w]) for w in members]:
                    self._say(w, m.WorkerAt(w, epoch, fake.commit, fake.begun, fake.place))
            case m.StopAgent(host=name):
                for w in [w for w in self.fakes if w.host == name]:
                    self._forget(w)
                self.answers = [e for e in self.answers if getattr(e, "host", "") != name]
                if self.world.stopping:
                    self.answers.append(m.AgentLost(name, "it was told to end"))
            case m.StartWorker(worker=w):
                assert w not in self.started, f"{w} was started twice"
                self.started.add(w)
                self.fakes[w] = FakeWorker()
                self._say(w, m.WorkerStarted(w, 1000 + len(self.started)), m.WorkerRegistered(w))
            case m.StopWorker(worker=w, kill=kill):
                self._forget(w)
                self.answers.append(m.WorkerExited(w, SIGKILL if kill else 0))
            case m.RunProgram(worker=w, job=job):
                assert not self.fakes[w].job, f"{w} still runs {self.fakes[w].job}"
                self.fakes[w] = FakeWorker(job)
                self._say_ready(w)
            case m.FormWorld():
                self._form(command)
            case m.PrepareWorld(order=order):
                for w in order.members:
                    self._say(w, m.WorkerPrepared(w, order.epoch))
            case m.DropWorld(epoch=epoch, members=members):
                for w in members:
                    self._unsay(w, m.WorkerPrepared)
                    if self.fakes[w].epoch == epoch:
                        self._abort(w, epoch)
            case m.AskLeave(epoch=epoch, members=members):
                for w in members:
                    if not self.fakes[w].returned:
                        self._say(w, m.WorkerOffered(w, epoch, self.fakes[w].steps))
            case m.LeaveAt(members=members, commit=commit):
                for w in members:
                    self._leave(w, commit)
            case m.Stay(epoch=epoch, members=members):
                for w in members:
                    self._unsay(w, m.WorkerReady)
                    self.fakes[w].epoch, self.fakes[w].left = epoch, epoch - 1
            case m.AbortWorld(epoch=epoch, members=members):
                for w in members:
                    self._abort(w, epoch)
            case m.StopProgram(job=job, workers=workers, culprit=culprit):
                for w in workers:
                    self._quit(w, job, "its own error" if w == culprit else "the job was stopped")
            case m.EndJob() | m.Record():
                pass

    def _hello(self, name: str) -> m.AgentReady:
        if name not in self.addresses:
            return m.AgentReady(name, 1)
        self.homes[name] = self.addresses[name][0]
        named = enumerate(self.addresses[name])
        interfaces = [m.Interface("lo" if a.startswith("127.") else f"eth{i}", a) for i, a in named]
        return m.AgentReady(name, 1, tuple(interfaces), 4711)

    def store(self, w: m.WorkerId, epoch: int) -> str:
        return f"{self.homes[w.host]}:{w.slot}{epoch}" if w.host in self.homes else f"{w}@{epoch}"

    def _rehome(self, name: str, address: str) -> None:
        self.homes[name] = address
        for w, fake in self.fakes.items():
            if w.host != name or not fake.job or fake.returned:
                continue
            if not fake.epoch:
                self._say_ready(w)
            elif fake.offered:
                self._say(w, m.StoreOffered(w, fake.epoch, self.store(w, fake.epoch)))

    def _form(self, order: m.FormWorld) -> None:
        for rank, w in enumerate(order.members):
            fake = self.fakes.get(w)
            if (order.to and w not in order.to) or fake is None or order.epoch <= fake.left:
                continue
            if order != self.world.plan:  # else who has left the old epoch still says so
                self._unsay(w, m.WorkerReady)
            fake.epoch, fake.steps, fake.offered, fake.begun = order.epoch, 0, False, 0
            if rank in order.receivers:
                source = self.fakes.get(order.members[order.root])
                fake.commit, fake.clean = source.commit if source else fake.commit, True
            elif order == self.world.plan:
                assert fake.commit == self.fakes[order.members[order.root]].commit, f"{w} is not up to date"
            self._say(w, m.WorkerFormed(w, order.epoch))

    def _leave(self, w: m.WorkerId, commit: int) -> None:
        fake = self.fakes[w]
        if fake.returned:
            return
        fake.commit += commit - fake.steps
        fake.left, fake.epoch = fake.epoch, 0
        self._say_ready(w)

    def _abort(self, w: m.WorkerId, epoch: int) -> None:
        fake = self.fakes.get(w)
        if fake is None or not fake.job or fake.returned:
            return
        self._unsay(w, m.WorkerFormed, m.WorkerOffered, m.WorkerReady)
        fake.left, fake.epoch = max(fake.left, epoch), 0
        self._say_ready(w)

    def _quit(self, w: m.WorkerId, job: str, error: str) -> None:
        fake = self.fakes.get(w)
        if fake is None or fake.job != job:
            return
        self._unsay(w, m.WorkerFormed, m.WorkerOffered, m.WorkerReady)
        fake.job, fake.epoch = "", 0
        self._say(w, m.ProgramEnded(w, job, "" if fake.returned else error))

    def _say_ready(self, w: m.WorkerId) -> None:
        fake = self.fakes[w]
        self._say(w, m.WorkerReady(w, fake.job, fake.left, fake.commit, fake.clean, self.store(w, fake.left)))

    def _say(self, w: m.WorkerId, *events: m.Event) -> None:
        if w in self.fakes and w not in self.silent:
            self.answers.extend(events)

    def _unsay(self, w: m.WorkerId, *kinds: type[m.Event]) -> None:
        self.answers = [e for e in self.answers if not (isinstance(e, kinds) and e.worker == w)]

    def _forget(self, w: m.WorkerId) -> None:
        self.answers = [e for e in self.answers if getattr(e, "worker", None) != w]
        self.fakes.pop(w, None)


def with_stage(stage: Stage) -> Story:
    """Three workers on three hosts and min 2; stopped at `stage`, a world being old enough to have state."""
    story = Story("a:1", "b:1", "c:1", min=2, cooldown=(0.0, 0.0))
    if stage is Stage.FORMING:
        story.answer()
        story.submit().hear(m.WorkerReady)
    else:
        story.run().commit(3)
    if stage in (Stage.PREPARING, Stage.ASKED, Stage.LEAVING):
        story.add("d:1").answer(lambda e: not isinstance(e, m.WorkerPrepared))
    if stage in (Stage.ASKED, Stage.LEAVING):
        story.hear(m.WorkerPrepared)
    if stage is Stage.LEAVING:
        story.hear(m.WorkerOffered)
    assert story.world.stage is stage, story.world.reason
    return story
