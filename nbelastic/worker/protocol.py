"""The decisions of a worker: messages and the time go in, actions come out.

This module uses no socket, thread, clock or process group: `LinkThread` and `Session` carry the actions out, and see to
it that one thread at a time calls these methods.
"""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from msgspec import Struct

from nbelastic.protocol import cell_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.worker.formation import Formation, formation_of
from nbelastic.worker.telemetry import Telemetry
from nbelastic.worker.worker_report import WorkerFacts

MAX_ERROR = 500  # characters of an error's text; the traceback has all of it
News = messages.Message | Formation


class Action(Struct, frozen=True):
    """Something for the worker's process to do."""


class Send(Action):
    """Send a message to the driver. With `newest`, a newer one of its kind may replace it, and it may be lost."""

    message: messages.Message | ev.Event
    newest: bool = False


class Introduce(Action):
    """Begin a new session with a report: a new driver needs none of the messages that the last one missed."""


class Post(Action):
    """Pass this to the main thread, which reads it at its next commit or between generations."""

    news: News


class Perform(Action):
    """Do what this message of the driver asks of the process."""

    message: messages.Message


class PrepareGroup(Action):
    """Build the group of this formation beside the training."""

    formation: Formation


class SendOutput(Action):
    """Send the program's new output; with `later`, keep its end until the driver takes it."""

    later: bool = False


class AbortGroup(Action):
    """Abort the present or last group for all, so that its other members raise as well: no driver asks them to."""


class EndProcess(Action):
    """End this process: there is no driver any more."""


class LinkState(Struct, frozen=True):
    """The connection to the driver. `received_at`: when its last message came, or this process ran again (seconds)."""

    disconnected: bool
    congested: bool
    received_at: float


class Protocol:
    """Of one worker. Times are seconds of one clock."""

    def __init__(self, worker: WorkerId, lease: float) -> None:
        """`lease`: seconds without a driver after which the worker ends."""
        self.worker = worker
        self._lease = lease
        self._term = 0  # of the newest driver
        self.facts = WorkerFacts()
        self.job = ""
        self.program = 0  # the number of the job's program that runs here
        self.on_trial = False  # it is a new one, which the driver has not accepted yet
        self.quit: worker_messages.StopProgram | None = None  # the job is over
        self._newest_quit: worker_messages.StopProgram | None = None  # maybe of a job whose program has not begun
        self._writes_last: bool | None = None  # the job's last checkpoint; None: the driver has named no worker
        self.left = 0  # the newest generation that this worker has left
        self.generation = 0  # the one whose group this worker has, or is forming; 0: none
        self.formation: Formation | None = None  # of that generation, when its group is formed
        self.rank = 0  # in this generation or, between generations, in the last one of this job
        self.commits = 0  # in this generation
        self.total = 0  # in all generations
        self.pause_at: int | None = None  # the commit at which to wait for the leave point
        self.halt_at: int | None = None  # the commit at which to stand still, and to report that
        self.leave_at: int | None = None  # the leave point
        self.is_in_cell = False  # a cell runs, or the driver has not judged yet whether all can train on after it
        self.removed: tuple[int, ...] = ()  # ranks that end after the leave point
        self._aborted = 0  # the newest generation that was aborted
        self._dropped: set[int] = set()  # generations that were prepared and never formed
        self.telemetry = Telemetry()
        self._unsent_result: worker_messages.ProgramResult | None = None

    @property
    def is_rank_0(self) -> bool:
        """Whether this rank prints, reports and saves for all: rank 0 of this world or, between worlds, of the last one."""
        return self.rank == 0

    def last_turn(self, *, disconnected: bool) -> int | None:
        """When this worker writes the job's last checkpoint: 0: at once; n: as n-th, if no other has; None: never.

        The driver names a worker. If there is none, each rank waits for those before it, which may be lost. Rank 0 looks, too: if only
        its host was cut off from the driver, the others have trained on.
        """
        if self._writes_last is None and disconnected:
            return self.rank + 1
        writes = self.is_rank_0 if self._writes_last is None else self._writes_last
        return 0 if writes else None

    @property
    def has_promised(self) -> bool:
        """Whether this worker has promised not to pass a commit."""
        return self.pause_at is not None or self.leave_at is not None

    @property
    def is_timing_steps(self) -> bool:
        """Whether other ranks may wait for this one's steps. While a world forms or ends, the workers need the processors."""
        formation = self.formation
        if formation is None or formation.world_size == 1 or self.commits == 0:
            return False
        return not self.is_over(formation.generation)

    def is_over(self, generation: int) -> bool:
        """Whether no worker may be in this generation any more."""
        return generation <= self._aborted or generation in self._dropped or self.quit is not None

    def stopped(self, job: str) -> str | None:
        """Why this job is over, if it is; also if its program has not begun here."""
        order = self._quit_of(job)
        return order.reason if order is not None else None

    def _quit_of(self, job: str) -> worker_messages.StopProgram | None:
        order = self._newest_quit
        return order if order is not None and order.job == job else None

    # ---- called by the main thread ----

    def begin(self, job: str, program: int = 0) -> None:
        """Begin a program: drop what belongs to the last one."""
        self.program, self.on_trial = program, False
        self.job, self.left, self.generation, self.commits, self.total, self.rank = job, 0, 0, 0, 0, 0
        self._forget_promises()
        self.quit, self._writes_last = self._quit_of(job), None
        self.telemetry = Telemetry()
        self.facts.is_beginning = False

    def ready(self, commit: int, *, clean: bool, store: str) -> ev.WorkerReady:
        """The event of a worker that waits for a world."""
        facts = self.facts
        event = ev.WorkerReady(
            self.worker,
            self.job,
            self.left,
            commit,
            clean,
            store,
            facts.holds_state,
            facts.state_since,
            self.program,
        )
        facts.last_event = event
        return event

    def leave(self) -> None:
        """The worker has left its generation."""
        self.left, self.generation, self.formation = max(self.left, self.generation), 0, None
        self.facts.is_formed = False

    def enter(self, news: News | None) -> Formation | None:
        """Called while the worker waits for a world: returns its formation, if `news` is one that is not over."""
        match news:
            case Formation(generation=generation) if generation > self.left and not self.is_over(generation):
                self.commits = 0
                self._forget_promises()
                if self.on_trial:  # it stops at its first commit, until the driver has decided
                    self.pause_at = self.halt_at = 1
                self.facts.last_event = None
                return news
            case Formation(generation=generation) | worker_messages.Abort(generation=generation):
                self.left = max(self.left, generation)  # a generation aborted before it began counts as left
        return None

    def joined(self, formation: Formation) -> None:
        """The group is formed."""
        self.formation, self.rank = formation, formation.rank

    @property
    def stands_still(self) -> bool:
        """Whether this worker has come to the commit at which all stop."""
        return self.halt_at is not None and self.commits >= self.halt_at

    def formed(self, phases: dict[str, float]) -> ev.WorkerFormed:
        """The group is formed and this worker has the state. `phases`: name -> milliseconds."""
        self.facts.is_formed = self.facts.holds_state = True
        self.facts.state_since = self.generation
        return ev.WorkerFormed(self.worker, self.generation, phases)

    def raised(self, error: str, *, intact: bool) -> ev.WorkerRaised:
        """The user's function raised."""
        event = ev.WorkerRaised(self.worker, self.generation, intact, error[:MAX_ERROR])
        self.facts.last_event = event
        return event

    # ---- messages of the driver ----

    def receive(self, message: messages.Message) -> list[Action]:
        self.facts.note_generation(message)
        match message:
            case messages.NewDriver(term=term):
                if term < self._term:
                    return []
                self._term = term
                self._unsent_result = self.facts.result
                return [Introduce()]
            case worker_messages.Prepare(formation=formation):
                return (
                    [] if self.is_over(formation.generation) else [PrepareGroup(formation_of(formation, self.worker))]
                )
            case worker_messages.Formation():
                return [Post(formation_of(message, self.worker))]
            case worker_messages.Abort(generation=generation):
                self._aborted = max(self._aborted, generation)
                return [Post(message)]
            case worker_messages.DropGroup(generation=generation):
                self._dropped.add(generation)
                return [Post(message)]
            case worker_messages.StopProgram(job=job):
                self._newest_quit = message
                if job != self.job:
                    return []
                self.quit = message
                self._writes_last = self._writes_last if message.writes is None else message.writes
                return [Post(message)]
            case worker_messages.Leave():
                return [*self._set_leave_point(message), Post(message)]
            case worker_messages.Halt(generation=generation, commit=commit):
                if generation == self.generation:
                    self.pause_at = self.halt_at = commit
                    self.is_in_cell = False
                return [Post(message)]
            case cell_messages.CommitCell(generation=generation):
                self.is_in_cell = generation == self.generation
                return [Post(message)]
            case messages.Rehome():
                return [Perform(message), Post(message)]
            case worker_messages.NewProgram() | worker_messages.KeepProgram():
                return [Post(message), Perform(message)]
            case worker_messages.LoadKeptState():
                return [Post(message)]
        return [Perform(message)]

    def _set_leave_point(self, message: worker_messages.Leave) -> list[Action]:
        """Promise not to pass the next commit, set the leave point, or clear both.

        The promise is made here and not at a commit. The main thread may never reach a commit: ranks that have promised
        already take no part in the step that it is in.
        """
        if message.generation != self.generation:
            return []
        match message.commit:
            case None:
                self.pause_at = self.commits + 1
                return [Send(ev.LeaveAcknowledged(self.worker, message.generation, self.commits, message.ask))]
            case worker_messages.Leave.STAY:
                self._forget_promises()
            case commit:
                self.pause_at, self.leave_at, self.removed = None, commit, message.removed
        return []

    def _forget_promises(self) -> None:
        """Train on: neither leave nor stand still."""
        self.pause_at = self.leave_at = self.halt_at = None
        self.is_in_cell = False

    def program_ended(self, result: worker_messages.ProgramResult) -> None:
        """Send the result with the next tick, after the program's output."""
        self.facts.result, self.facts.busy = result, False
        self.repeat_result()

    def repeat_result(self) -> None:
        """Send the newest program's result again, if it has ended."""
        self._unsent_result = self.facts.result

    def report(self, pid: int, store: str) -> worker_messages.WorkerReport:
        """For a new driver. `store`: the endpoint that is offered for the next generation. The main thread goes on meanwhile."""
        facts = self.facts
        newest = max(facts.newest_generation, self.left, self.generation)
        if facts.is_beginning:  # the other facts are still of the program before
            return worker_messages.WorkerReport(
                self.worker, pid, facts.is_ready, facts.job, facts.busy, highest_generation=newest, engine=facts.engine
            )
        formation, order = self.formation, self.quit
        return worker_messages.WorkerReport(
            self.worker,
            pid,
            facts.is_ready,
            facts.job,
            facts.busy,
            self.left,
            self.generation,
            self.rank,
            formation.world_size if formation is not None else 0,
            # A new driver does not know the cell: it breaks the world, so that all ranks have one state again.
            facts.is_formed and formation is not None and not (self.is_over(formation.generation) or self.is_in_cell),
            newest,
            self.has_promised,
            self.total,
            facts.holds_state,
            store,
            order.reason if order is not None and not order.own else "",
            facts.last_event,
            facts.unsent.take(),
            facts.state_since,
            facts.engine,
        )

    # ---- time ----

    def tick(self, now: float, link: LinkState) -> list[Action]:
        alone = link.disconnected or self._lease < now - link.received_at
        actions: list[Action] = [SendOutput(later=alone or link.congested)]
        if alone:
            actions += self._tick_without_driver(now, link)
        actions += self._send_progress(now, link)
        if self._unsent_result is not None:
            actions.append(Send(self._unsent_result))
            self._unsent_result = None
        return actions

    def _tick_without_driver(self, now: float, link: LinkState) -> list[Action]:
        """Abort a broken generation, so that its members do not block; end the program when the lease has expired."""
        event, actions = self.facts.last_event, list[Action]()
        if self.generation:
            lost = isinstance(event, ev.WorkerRaised) and not event.intact and event.generation == self.generation
        else:  # it has left an aborted one: the abort may not have reached others, which wait for this worker
            lost = 0 < self.left <= self._aborted
        if lost:
            actions.append(AbortGroup())
        if now - link.received_at > self._lease:
            if not self.facts.busy:
                return [*actions, EndProcess()]
            if self.quit is None:  # end as a stopped job does: with a last checkpoint, if the job has those
                reason = f"no driver has come for {self._lease:g} s (lease)"
                actions += self.receive(worker_messages.Abort(self.facts.newest_generation, reason))
                actions += self.receive(worker_messages.StopProgram(self.job, reason))
        return actions

    def _send_progress(self, now: float, link: LinkState) -> list[Action]:
        size = self.formation.world_size if self.formation is not None else 1
        due = self.telemetry.due(now, self.generation, self.commits, world_size=size, is_rank_0=self.is_rank_0)
        if due is None:
            return []
        if link.disconnected:
            self.facts.unsent.add(self.total, due.values)
            return []
        generation, about = self.generation or self.left, (due.first, due.copies, due.checkpoint, due.replica, due.own)
        progress = worker_messages.WorkerProgress(self.worker, generation, self.total, due.values, *about)
        # A generation's first progress and a program's last one must arrive.
        return [Send(progress, newest=due.first is None and self.facts.busy and not due.is_urgent)]
