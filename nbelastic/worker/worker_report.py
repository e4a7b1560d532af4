"""What a worker tells a driver that has taken the cluster over, and what it keeps for it meanwhile."""

from __future__ import annotations

from nbelastic.protocol import events as ev
from nbelastic.protocol import messages, worker_messages

KEPT = 256  # reports; when there are more, every other one goes

Report = dict[str, float | None]


class Reports:
    """Of a time without a driver, however long: thinned out evenly, the last one always among them."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, Report]] = []
        self._every = self._skipped = 0
        self._last: tuple[int, Report] | None = None

    def add(self, commit: int, report: Report) -> None:
        self._last = (commit, report)
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._kept.append(self._last)
        if len(self._kept) == KEPT:
            self._kept = self._kept[::2]
            self._every = max(1, self._every) * 2

    def take(self) -> tuple[tuple[int, Report], ...]:
        """All, by commit; from now on there are none."""
        kept, last = self._kept, self._last
        self.__init__()  # type: ignore[misc]
        return (*kept, last) if last is not None and last not in kept else tuple(kept)


class Account:
    """Each thing is written before the word that tells the same is sent: what a new driver has not heard, it finds here."""

    def __init__(self) -> None:
        self.engine = ""
        self.job = ""  # that of the newest program
        self.busy = False  # it runs
        self.beginning = False  # what the session knows is still of the one before
        self.formed = False  # the group of this generation stands, and has the state
        self.holds = False  # it has the job's state, all of one commit
        self.since = 0  # the generation in which it last got it, or trained with it
        self.word: ev.WorkerReady | ev.WorkerRaised | ev.WorkerSucceeded | None = None
        self.result: worker_messages.ProgramResult | None = None  # of the newest program, if it has ended
        self.numbered = 0  # the highest generation that it has heard of
        self.reports = Reports()

    def begin(self, job: str) -> None:
        """A new program."""
        self.job, self.beginning = job, True
        self.busy, self.formed, self.holds, self.since, self.word = True, False, False, 0, None
        self.result = None
        self.reports = Reports()

    def hear(self, message: messages.Message) -> None:
        """Generations are numbered on from the highest that anybody knows."""
        match message:
            case worker_messages.Prepare(formation=formation):
                self.numbered = max(self.numbered, formation.generation)
            case (
                worker_messages.Formation(generation=generation)
                | worker_messages.Abort(generation=generation)
                | worker_messages.DropGroup(generation=generation)
            ):
                self.numbered = max(self.numbered, generation)
