"""A cluster of fake agents and workers that carry out the commands of the core when the story lets them.

A `Story` owns one cluster state. The answers of agents and workers wait in `answers` until the story sends them
(`answer()`), so that a test decides the order of events. After every step `check` asserts the invariants.
"""

from __future__ import annotations

from collections.abc import Callable

from nbelastic.core import commands as cmd
from nbelastic.core.reasons import in_words
from nbelastic.core.state import ClusterState, Stage, WorkerState
from nbelastic.core.step import deadline, step
from nbelastic.protocol import events as ev
from nbelastic.protocol import messages
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.host_parsing import parse_host
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.program_events import BreakpointLeft, BreakpointReached, SwapFailed
from tests.core.fakes import SIGKILL, FakeCluster, wid
from tests.core.invariants import check, check_stores
from tests.core.repeats import check_doubled, check_more
from tests.support import decisions

AWAITED = (
    *(ev.WorkerPrepared, ev.LeaveAcknowledged, ev.WorkerReady, ev.WorkerFormed, ev.PositionReported),
    *(ev.WorkerHalted, ev.CommitCellEnded),
)
FROM_PROGRAM = (  # what a program in the debugger does not report before it has left it
    *(ev.WorkerFormed, ev.WorkerHalted, ev.CommitCellEnded, ev.WorkerRaised, ev.WorkerSucceeded, SwapFailed),
)
IN_TIME = 1e-6
ASKS = 20  # how often hung workers ask in one `quiet`


LIVE = (Stage.FORMING, Stage.RUNNING, Stage.PREPARING, Stage.ASKED, Stage.LEAVING, Stage.HALTED)


class Story(FakeCluster):
    """`Story("a:2", "b:2", min=2, max=4)`: hosts are added by hand and wait for `answer`."""

    def __init__(self, *hosts: str, **limits) -> None:
        super().__init__(ClusterState(Limits(**limits)))
        self.now = 100.0
        self.said: list[cmd.Command] = []
        self.heard: list[ev.Event] = []
        self.versions = 0  # of setup cells
        decisions.note_story(self)
        for host in hosts:
            self.add(host)

    # ---- events ----

    def send(self, *events: ev.Event) -> tuple[cmd.Command, ...]:
        """Give events to the core and carry out its commands. Returns the commands of the last event."""
        commands: tuple[cmd.Command, ...] = ()
        for event in events:
            if isinstance(event, FROM_PROGRAM):
                self.leave_debugger(event.worker)
            before = self.cluster
            self.note_sent(event)
            self.cluster, commands = step(before, event, self.now)
            self.said.extend(commands)
            decisions.note(event, commands, in_words(self.cluster.reason, self.now))
            for command in commands:
                self._obey(command)
            check(before, self.cluster, commands, self.now)
            check_more(before, event, self.now, self.cluster, commands)
            check_stores(self, event, commands)
            if deadline(before, self.now) > self.now:  # else a message may belong to what has ended in this step
                check_doubled(self.cluster, event, self.now)
        return commands

    def note_sent(self, event: ev.Event) -> None:
        """Update the fake worker that has sent this event."""
        self.heard.append(event)
        fake = self.fakes.get(getattr(event, "worker", None))
        if fake is None:
            return
        match event:
            case ev.WorkerExited(worker=w):
                self._forget(w)
            case ev.WorkerFormed(generation=generation) if generation == fake.generation:
                fake.formed = fake.holds = True
                fake.since = generation
            case ev.WorkerRaised(generation=generation) | ev.WorkerSucceeded(generation=generation) if (
                generation == fake.generation
            ):
                fake.word = event
            case BreakpointReached():
                fake.debugs = True
            case BreakpointLeft():
                fake.debugs = False
            case ev.WorkerReady() if event is fake.word:  # pdb may not have reported that it was left
                fake.debugs = False

    def leave_debugger(self, *workers: WorkerId) -> None:
        """The users let these programs go on that wait in the debugger."""
        for w in workers:
            if w in self.fakes and self.fakes[w].debugs:
                self.send(BreakpointLeft(w))

    def fail_program(self, w: WorkerId) -> None:
        """A new program raises on this worker before its first commit."""
        fake = self.fakes[w]
        if w not in self.stuck:
            program, (old, _) = fake.program, fake.old
            self._keep_program(w, old)
            self.send(SwapFailed(w, program, "ValueError: no"))

    def answer(self, which: Callable[[ev.Event], bool] = lambda _: True, limit: int = 100_000) -> Story:
        """Send the fakes' answers in order until there are none (of those that `which` picks)."""
        for _ in range(limit):
            event = next((answer for answer in self.answers if which(answer)), None)
            if event is None:
                return self
            self.answers.remove(event)
            self.send(event)
        raise AssertionError("the conversation never ends")

    def hear(self, kind: type[ev.Event], *workers: str, limit: int = 100_000) -> Story:
        """Send the answers of one kind (of these workers only, if named)."""
        names = {wid(w) for w in workers}
        return self.answer(lambda e: isinstance(e, kind) and (not names or e.worker in names), limit)

    def wait(self, seconds: float) -> Story:
        """Time passes; `Ticked` is sent at every deadline, as the driver does."""
        end = self.now + seconds
        for _ in range(1000):
            at = deadline(self.cluster, self.now)
            if at > end:
                self.now = end
                return self
            self.now = at
            self.send(ev.Ticked())
            assert deadline(self.cluster, self.now) > self.now, f"a hot loop: {self.reason}"
        raise AssertionError("too many ticks")

    def quiet(self, seconds: float = 0.0) -> Story:
        """All answer, time passes, and all answer."""
        self.answer()
        end = self.now + seconds
        asks = ASKS
        while self.now < end:
            until = min(end, deadline(self.cluster, self.now))
            if asks and self._ask_again():
                asks, until = asks - 1, min(until, self.now + 0.25)
            self.answer()
            self.wait(max(IN_TIME, until - self.now))
            self.answer()
        return self

    def add(self, host: str, *addresses: str) -> Story:
        self.addresses |= {host.partition(":")[0]: addresses} if addresses else {}
        self.send(ev.HostAdded(parse_host(host, 1), "a test"))
        return self

    def remove(self, name: str, *, now: bool = False, within: float | None = None, replaced: bool = False) -> Story:
        self.send(ev.HostRemoved(name, now, "a test", within, replaced))
        return self

    def stop_job(self, name: str = "job") -> Story:
        self.send(ev.JobStopRequested(name))
        return self

    def discover(self, *hosts: str) -> tuple[cmd.Command, ...]:
        return self.send(ev.HostsDiscovered(tuple(parse_host(host, 1) for host in hosts)))

    def scale(self, low: int, high: int | None) -> Story:
        self.send(ev.Scaled(low, high, "a test"))
        return self

    def set_up(self, key: str, source: str) -> Story:
        """A client runs a setup cell."""
        self.versions += 1
        self.send(ev.SetupSubmitted(key, source, self.versions))
        return self

    def push(self, *names: str) -> Story:
        """A client pushes values. Their source is the names and the number of the push, as in `x,y 3`."""
        self.versions += 1
        pushed = messages.Pushed(names, messages.Blob(1, path=f"/run/{self.versions}"))
        self.send(
            ev.SetupSubmitted(f"push:{','.join(names)}", f"{','.join(names)} {self.versions}", self.versions, pushed)
        )
        return self

    def submit(self, job: str = "job") -> Story:
        self.send(ev.JobSubmitted(job))
        return self

    def run(self, job: str = "job") -> Story:
        """From any state to a world that trains."""
        self.answer()
        self.submit(job).quiet(2.0)
        assert self.cluster.stage is Stage.RUNNING, self.reason
        return self

    def commit(self, count: int = 1) -> Story:
        """Every member makes `count` commits."""
        for w, fake in [(w, self.fakes[w]) for w in self.cluster.members if w in self.fakes]:
            fake.commit += count
            fake.steps += count
            fake.begun += count
            if fake.steps > 1 and not fake.offered:
                fake.offered = True
                self._say(w, ev.StoreOffered(w, fake.generation, self.store(w, fake.generation)))
        return self

    def kill(self, *workers: str, code: int = SIGKILL) -> Story:
        """Processes end, and their agents report it."""
        for name in workers:
            w = wid(name)
            self._forget(w)
            self.send(ev.WorkerExited(w, code))
        return self

    def lose_host(self, name: str, reason: str = "its machine is gone") -> Story:
        self.end_agent(name)
        self.send(ev.AgentLost(name, reason))
        return self

    def send_about(self, w: WorkerId, event: ev.Event) -> Story:
        """Send an event for which the driver may kill this worker. Its end is not reported then."""
        mark = self.mark()
        self.send(event)
        if cmd.StopWorker(w, kill=True) in self.commands(cmd.StopWorker, mark):
            self._forget(w)
        return self

    def mend(self) -> Story:
        """All hosts reach one another, and answer probes."""
        self.cut.clear()
        self.mute.clear()
        return self

    def tear(self, *workers: str) -> Story:
        """A transfer breaks off: the receivers hold parts of two commits, and report it."""
        for name in workers:
            self.fakes[wid(name)].holds = False
            self._unsay(wid(name), ev.WorkerFormed)
            if any(isinstance(e, ev.WorkerReady) and e.worker == wid(name) for e in self.answers):
                self._unsay(wid(name), ev.WorkerReady)
                self._say_ready(wid(name))
        return self

    def raised(self, worker: str, error: str = "ValueError: no", *, intact: bool = True) -> Story:
        self.send(ev.WorkerRaised(wid(worker), self.cluster.generation, intact, error))
        return self

    def returned(self, *workers: str) -> Story:
        """The elastic function returns."""
        for name in workers:
            fake = self.fakes[wid(name)]
            fake.returned = True
            self.hold_back(wid(name))
            self.send(ev.WorkerSucceeded(wid(name), fake.generation))
        return self

    def stand_still(self, seconds: float = 3.0, times: int = 1) -> Story:
        """The driver reports a stall every second, and the members answer."""
        for number in range(times):
            self.send(ev.StallDetected(self.cluster.generation, seconds + number))
            self.answer(lambda e: isinstance(e, ev.PositionReported | ev.Probed))
        return self

    def hang(self, *workers: str) -> Story:
        """The workers' processes go on, and no longer send what is awaited."""
        for name in workers:
            self.silent.add(wid(name))
            self._unsay(wid(name), *AWAITED)
        return self

    def stick(self, worker: str) -> Story:
        """A worker's main thread hangs in a collective, which shows when the generation is aborted."""
        w = wid(worker)
        self.stuck.add(w)
        self._unsay(w, *AWAITED)
        fake = self.fakes[w]
        if not fake.generation and fake.word is not None:
            fake.word = None
            self._ask_how_to_end(w, fake.left)
        return self

    def hold_back(self, w: WorkerId) -> None:
        """A worker that was about to report its leaving has not reached that commit."""
        fake = self.fakes[w]
        if any(isinstance(e, ev.WorkerReady) and e.worker == w for e in self.answers) or not fake.generation:
            if fake.generation:
                fake.rank, fake.size = fake.was
            fake.generation, fake.formed, fake.word = fake.left, True, None
            self._unsay(w, ev.WorkerReady, ev.WorkerFormed)
        self._unsay(w, ev.LeaveAcknowledged)

    def ended(self, *workers: str, error: str = "") -> Story:
        """The program ends."""
        for name in workers:
            fake = self.fakes[wid(name)]
            job = fake.job
            self.end_program(wid(name), error)
            self._unsay(wid(name), ev.WorkerReady, ev.WorkerFormed, ev.LeaveAcknowledged, ev.ProgramEnded)
            self.send(ev.ProgramEnded(wid(name), job, error))
        return self

    def finish(self) -> Story:
        """All ranks return, and their programs end."""
        members = self.names
        self.returned(*members)
        self.ended(*members)
        return self

    # ---- queries ----

    @property
    def reason(self) -> str:
        return in_words(self.cluster.reason, self.now)

    @property
    def names(self) -> list[str]:
        return [str(w) for w in self.cluster.members]

    @property
    def job(self):
        assert self.cluster.job is not None
        return self.cluster.job

    def commands(self, kind: type, since: int = 0) -> list:
        return [command for command in self.said[since:] if isinstance(command, kind)]

    def last(self, kind: type):
        found = self.commands(kind)
        assert found, f"no {kind.__name__} was commanded"
        return found[-1]

    def records(self, kind: str) -> list[str]:
        return [command.text for command in self.commands(cmd.Record) if command.kind == kind]

    def alive(self, host: str = "") -> list[str]:
        workers = self.cluster.workers.values()
        return [str(w.id) for w in workers if w.state is not WorkerState.STOPPED and w.id.host.startswith(host)]

    def mark(self) -> int:
        return len(self.said)  # for `commands(kind, mark)`: those since now


def with_stage(stage: Stage, **limits) -> Story:
    """Three workers on three hosts with min 2, in `stage`; the world is old enough to have state."""
    story = Story("a:1", "b:1", "c:1", **{"min": 2, "cooldown": (0.0, 0.0)} | limits)
    if stage is Stage.FORMING:
        story.answer()
        story.submit().hear(ev.WorkerReady)
    else:
        story.run().commit(3)
    if stage is Stage.GATHERING:
        story.kill("b/0#1")
    if stage in (Stage.PREPARING, Stage.ASKED, Stage.LEAVING):
        story.add("d:1").answer(lambda e: not isinstance(e, ev.WorkerPrepared))
    if stage in (Stage.ASKED, Stage.LEAVING):
        story.hear(ev.WorkerPrepared)
    if stage is Stage.LEAVING:
        story.hear(ev.LeaveAcknowledged)
    if stage is Stage.HALTED:
        story.send(ev.CommitCellSubmitted(1))
        story.hear(ev.LeaveAcknowledged).hear(ev.WorkerHalted, "a/0#1")
    assert story.cluster.stage is stage, story.reason
    return story
