"""What a worker reports to a new driver: facts that it keeps up to date, and the reports of a time without a driver."""

from __future__ import annotations

from nbelastic.protocol import events as ev
from nbelastic.protocol import messages, worker_messages

MAX_REPORTS = 256  # when there are more, every other one is dropped
MAX_TEXT = 600_000  # characters of all, about; the driver takes no much longer message
NUMBER = 28  # characters of a value, and of what is around it and its name

Report = dict[str, float | None]


class UnsentReports:
    """The program's reports while there is no driver: thinned out evenly, always with the newest one."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, Report]] = []
        self._every = self._skipped = 0
        self._newest: tuple[int, Report] | None = None

    def add(self, commit: int, report: Report) -> None:
        self._newest = (commit, report)
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._kept.append(self._newest)
        text = sum(len(name) + NUMBER for _, values in self._kept for name in values)
        if len(self._kept) == MAX_REPORTS or text > MAX_TEXT:
            self._kept = self._kept[::2]
            self._every = max(1, self._every) * 2

    def take(self) -> tuple[tuple[int, Report], ...]:
        """Return all as (commit, report), by commit, and drop them."""
        kept, newest = self._kept, self._newest
        self.__init__()  # type: ignore[misc]
        return (*kept, newest) if newest is not None and newest not in kept else tuple(kept)


class WorkerFacts:
    """Each fact is set before the message with the same content is sent: a new driver finds here what the last one missed."""

    def __init__(self) -> None:
        self.is_ready = False  # this worker can run programs and cells
        self.engine = ""  # the uuid of its ipyparallel engine, if it is one
        self.job = ""  # of the newest program
        self.busy = False  # the program runs
        self.is_beginning = False  # the session still holds facts of the program before
        self.is_formed = False  # the group of this generation is formed, and has the state
        self.holds_state = False  # this worker has the job's state, all of one commit
        self.state_since = 0  # the generation in which it last received the state, or trained with it
        self.last_event: ev.WorkerReady | ev.WorkerRaised | ev.WorkerSucceeded | None = None
        self.result: worker_messages.ProgramResult | None = None  # of the newest program, if it has ended
        self.newest_generation = 0  # of all that the driver's messages have named
        self.unsent = UnsentReports()

    def begin(self, job: str) -> None:
        """Begin a program."""
        self.job, self.is_beginning = job, True
        self.busy, self.is_formed, self.holds_state, self.state_since, self.last_event = True, False, False, 0, None
        self.result = None
        self.unsent = UnsentReports()

    def note_generation(self, message: messages.Message) -> None:
        """A new driver numbers generations on from the newest that any worker has seen."""
        match message:
            case worker_messages.Prepare(formation=formation):
                self.newest_generation = max(self.newest_generation, formation.generation)
            case (
                worker_messages.Formation(generation=generation)
                | worker_messages.Abort(generation=generation)
                | worker_messages.DropGroup(generation=generation)
            ):
                self.newest_generation = max(self.newest_generation, generation)
