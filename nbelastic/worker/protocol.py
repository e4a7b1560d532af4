"""What a worker says to its driver, and does at the driver's word: messages and the time go in, actions come out.

There is no socket, thread, clock or process group in here: `Session` carries the actions out. The methods are for one
thread at a time; `Session` sees to that.
"""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

import math

from msgspec import Struct

from nbelastic.protocol import events as ev
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.worker.formation import Formation, formation_of
from nbelastic.worker.worker_report import Account

REPORT_EVERY = 0.25  # seconds between two reports of rank 0
REPORT_RARELY = 1.0  # the same of all other ranks, of whom only is shown how far they are
ERROR_BOUND = 500  # characters of an error's text; the traceback has all of it
News = messages.Message | Formation


class Action(Struct, frozen=True):
    """Something to be done by the worker's process."""


class Say(Action):
    """`newest`: it may be lost, and replaced by a newer one of its kind."""

    message: messages.Message | ev.Event
    newest: bool = False


class Introduce(Action):
    """Tell a new driver all that it needs to know, and nothing that the last one has missed."""


class Post(Action):
    """The main thread is to read this at its next commit or between generations."""

    news: News


class Do(Action):
    """Something that only a process can do: the driver's message says what."""

    message: messages.Message


class Build(Action):
    """Build the group of this formation beside the training."""

    formation: Formation


class SendOutput(Action):
    """What the program has printed goes to the driver; `later`: it is kept until there is one that takes it."""

    later: bool = False


class Abort(Action):
    """Those who train with this worker are to raise as well."""


class End(Action):
    """Nobody needs this process any more."""


class Line(Struct, frozen=True):
    """The connection to the driver: is it `away`, or so `crowded` that output should wait, and when it was `heard_at`."""

    away: bool
    crowded: bool
    heard_at: float


class Protocol:
    """Of one worker. Times are of one clock, in seconds."""

    def __init__(self, worker: WorkerId, lease: float) -> None:
        """`lease`: seconds without a driver after which the worker ends."""
        self.worker = worker
        self._lease = lease
        self._term = 0  # of the newest driver
        self.account = Account()
        self.job = ""
        self.quit: worker_messages.StopProgram | None = None
        self._last_quit: worker_messages.StopProgram | None = None  # it may be of a job whose program has not begun
        self.left = 0  # the last generation that was left
        self.generation = 0  # the one whose group this worker has, or is forming; 0: none
        self.formation: Formation | None = None  # of that, when its group stands
        self.rank = 0  # in this generation or, between generations, in the last of this job
        self.commits = 0  # in this generation
        self.total = 0  # over all generations
        self.hold: int | None = None  # the commit at which to wait for word of where to leave
        self.leave_at: int | None = None
        self._aborted = 0  # the newest generation that was aborted
        self._dropped: set[int] = set()  # generations that were prepared for nothing
        self.reports = Telemetry()
        self._unsent: worker_messages.ProgramResult | None = None

    @property
    def speaks(self) -> bool:
        """Whether what all ranks have to say is said by this one: rank 0 of this world or, between worlds, of the last."""
        return self.rank == 0

    @property
    def bound(self) -> bool:
        """Whether it has promised not to go on by itself."""
        return self.hold is not None or self.leave_at is not None

    def over(self, generation: int) -> bool:
        """Whether nobody is to be in this generation any more."""
        return generation <= self._aborted or generation in self._dropped or self.quit is not None

    def stopped(self, job: str) -> str | None:
        """Why this job is over, if it is, also if its program has not begun here."""
        told = self._quit_of(job)
        return told.reason if told is not None else None

    def _quit_of(self, job: str) -> worker_messages.StopProgram | None:
        told = self._last_quit
        return told if told is not None and told.job == job else None

    # ---- the main thread ----

    def begin(self, job: str) -> None:
        """A new program: nothing of the last one counts."""
        self.job, self.left, self.generation, self.commits, self.total, self.rank = job, 0, 0, 0, 0, 0
        self.hold = self.leave_at = None
        self.quit = self._quit_of(job)
        self.reports = Telemetry()
        self.account.beginning = False

    def ready(self, commit: int, *, clean: bool, store: str) -> ev.WorkerReady:
        """What is said by who waits for a world."""
        account = self.account
        word = ev.WorkerReady(self.worker, self.job, self.left, commit, clean, store, account.holds, account.since)
        account.word = word
        return word

    def leave(self) -> None:
        """It has left its generation."""
        self.left, self.generation, self.formation = max(self.left, self.generation), 0, None
        self.account.formed = False

    def enter(self, news: News | None) -> Formation | None:
        """To who waits for a world: the world that it is in, if that is the news."""
        match news:
            case Formation(generation=generation) if generation > self.left and not self.over(generation):
                self.commits, self.hold, self.leave_at = 0, None, None
                self.account.word = None
                return news
            case Formation(generation=generation) | worker_messages.Abort(generation=generation):
                self.left = max(self.left, generation)  # aborted before it had begun: it has been left already
        return None

    def joined(self, formation: Formation) -> None:
        """Its group stands."""
        self.formation, self.rank = formation, formation.rank

    def formed(self, took: dict[str, float]) -> ev.WorkerFormed:
        """It has the state too. `took`: milliseconds a phase."""
        self.account.formed = self.account.holds = True
        self.account.since = self.generation
        return ev.WorkerFormed(self.worker, self.generation, took)

    def raised(self, error: str, *, intact: bool) -> ev.WorkerRaised:
        """The user's function raised."""
        word = ev.WorkerRaised(self.worker, self.generation, intact, error[:ERROR_BOUND])
        self.account.word = word
        return word

    # ---- the driver's word ----

    def receive(self, message: messages.Message) -> list[Action]:
        self.account.hear(message)
        match message:
            case messages.Welcome(term=term):
                if term < self._term:
                    return []
                self._term = term
                self._unsent = self.account.result
                return [Introduce()]
            case worker_messages.Prepare(formation=formation):
                return [] if self.over(formation.generation) else [Build(formation_of(formation, self.worker))]
            case worker_messages.Formation():
                return [Post(formation_of(message, self.worker))]
            case worker_messages.Abort(generation=generation):
                self._aborted = max(self._aborted, generation)
                return [Post(message)]
            case worker_messages.DropGroup(generation=generation):
                self._dropped.add(generation)
                return [Post(message)]
            case worker_messages.StopProgram(job=job):
                self._last_quit = message
                if job != self.job:
                    return []
                self.quit = message
                return [Post(message)]
            case worker_messages.Leave():
                return [*self._arrange(message), Post(message)]
            case messages.Rehome():
                return [Do(message), Post(message)]
            case worker_messages.LoadKeptState():
                return [Post(message)]
        return [Do(message)]

    def _arrange(self, message: worker_messages.Leave) -> list[Action]:
        """Where to leave this generation. The promise is made here and not at a commit: the main thread may not get to one, as
        others, who have made theirs, take no part in the step that it is in.
        """
        if message.generation != self.generation:
            return []
        match message.commit:
            case None:
                self.hold = self.commits + 1
                return [Say(ev.LeaveAcknowledged(self.worker, message.generation, self.commits, message.ask))]
            case worker_messages.Leave.STAY:
                self.hold = self.leave_at = None
            case commit:
                self.hold, self.leave_at = None, commit
        return []

    def program_ended(self, result: worker_messages.ProgramResult) -> None:
        """The driver is told with the next tick, after all that the program has printed."""
        self.account.result, self.account.busy = result, False
        self.say_result_again()

    def say_result_again(self) -> None:
        """How the newest program ended, if it has."""
        self._unsent = self.account.result

    def statement(self, pid: int, store: str) -> worker_messages.WorkerReport:
        """To a new driver. `store`: what is offered for the next generation. The main thread goes on meanwhile."""
        account, numbered = self.account, max(self.account.numbered, self.left, self.generation)
        if account.beginning:  # what else is known is still of the program before
            return worker_messages.WorkerReport(
                self.worker, pid, account.engine, account.job, account.busy, numbered=numbered
            )
        at, told = self.formation, self.quit
        return worker_messages.WorkerReport(
            self.worker,
            pid,
            account.engine,
            account.job,
            account.busy,
            self.left,
            self.generation,
            self.rank,
            at.world_size if at is not None else 0,
            account.formed and at is not None and not self.over(at.generation),
            numbered,
            self.bound,
            self.total,
            account.holds,
            store,
            told.reason if told is not None and not told.own else "",
            account.word,
            account.reports.take(),
            account.since,
        )

    # ---- time ----

    def tick(self, now: float, line: Line) -> list[Action]:
        alone = line.away or self._lease < now - line.heard_at
        actions: list[Action] = [SendOutput(later=alone or line.crowded)]
        if alone:
            actions += self._be_alone(now, line)
        actions += self._progress(now, line)
        if self._unsent is not None:
            actions.append(Say(self._unsent))
            self._unsent = None
        return actions

    def _be_alone(self, now: float, line: Line) -> list[Action]:
        """There is no driver. A broken world is left, as far as that goes, and nobody waits for ever."""
        word, actions = self.account.word, list[Action]()
        if (
            isinstance(word, ev.WorkerRaised)
            and not word.intact
            and self.generation
            and word.generation == self.generation
        ):
            actions.append(Abort())  # those who wait for this one are to raise as well
        if now - line.heard_at > self._lease:
            if not self.account.busy:
                return [*actions, End()]
            if self.quit is None:  # as if it were stopped: with a last checkpoint, if the job has those
                reason = f"no driver has come for {self._lease:g} s (lease)"
                actions += self.receive(worker_messages.Abort(self.account.numbered, reason))
                actions += self.receive(worker_messages.StopProgram(self.job, reason))
        return actions

    def _progress(self, now: float, line: Line) -> list[Action]:
        due = self.reports.due(now, self.generation, self.commits, often=self.speaks)
        if due is None:
            return []
        if line.away:
            self.account.reports.add(self.total, due.values)
            return []
        progress = worker_messages.WorkerProgress(
            self.worker, self.generation or self.left, self.total, due.values, due.first
        )
        # The first one of a generation, and the last of a program, are the only ones of their kind.
        return [Say(progress, newest=due.first is None and self.account.busy and not due.urgent)]


class Due(Struct, frozen=True):
    """What is to be reported now."""

    values: dict[str, float | None]
    first: float | None
    urgent: bool


class Telemetry:
    """What the program reports, from the main thread, and when it is sent, in the link's."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._not_finite: dict[str, None] = {}  # names that were so at least once since the last sending
        self._diverged: frozenset[str] = frozenset()  # names that were so in the last sending
        self._first: float | None = None
        self._sent: tuple[int, int] = (0, 0)
        self._next = 0.0

    def put(self, values: dict[str, float]) -> bool:
        """The newest are sent now and then. True: now, as one is not finite, and is not replaced by newer ones before."""
        self._values = values
        wrong = [name for name, value in values.items() if not math.isfinite(value)]
        self._not_finite.update(dict.fromkeys(wrong))
        return not self._diverged.issuperset(wrong)

    def begin(self, first: float) -> None:
        """The first commit of a generation, so many milliseconds after it was formed."""
        self._first = first

    def due(self, now: float, generation: int, commits: int, *, often: bool) -> Due | None:
        first = self._first
        if first is not None:  # else the main thread may be about to say it
            self._first = None
        values = self._values
        wrong = frozenset(self._not_finite.copy()).union(n for n, value in values.items() if not math.isfinite(value))
        urgent = not wrong <= self._diverged
        if first is None and not urgent and ((generation, commits) == self._sent or now < self._next):
            return None
        for name in wrong:
            self._not_finite.pop(name, None)
        every = REPORT_EVERY if often else REPORT_RARELY
        self._sent, self._next, self._diverged = (generation, commits), now + every, wrong
        return Due({**values, **dict.fromkeys(wrong)}, first, urgent)
