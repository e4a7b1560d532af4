"""What injected faults led to, from the event log. Pure functions of its records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from statistics import median

from nbelastic.protocol.chaos import KINDS, FaultKind
from nbelastic.protocol.status import EventRecord
from nbelastic.system.tables import html_table, text_table

_COLUMNS = ("fault", "injected", "survived", "median", "longest", "steps lost")
_ENDS = {"job-succeeded": True, "job-stopped": None, "job-failed": False}  # whether the faults before were survived


@dataclass(frozen=True)
class FaultOutcome:
    """An injected fault. `time`: seconds since 1970. `worker`: empty for a whole host.

    `survived`: None if that is not known. `recovery`: seconds to the next step, `steps_lost`: steps made again; None if no
    step was made after it. `steps_lost` is also None if the driver did not know it, as it was replaced just then.
    `why`: it was not survived, or why that is not known.
    """

    time: float
    kind: FaultKind
    host: str
    worker: str
    survived: bool | None
    recovery: float | None
    steps_lost: int | None
    why: str

    @property
    def victim(self) -> str:
        """The worker's or host's name."""
        return self.worker or self.host

    def __str__(self) -> str:
        """One line."""
        if self.recovery is not None:
            lost = "" if self.steps_lost is None else f", {_lost(self.steps_lost)}"
            return f"{self.kind} {self.victim}: next step after {seconds_text(self.recovery)}{lost}"
        word = {True: "survived", False: "not survived", None: "not known"}[self.survived]
        return f"{self.kind} {self.victim}: {word}{f': {self.why}' if self.why else ''}"


@dataclass(frozen=True)
class ChaosReport:
    """What `Cluster.chaos` has found. Times in seconds; `begun`: since 1970.

    `goodput`: the share of `seconds` in which steps were made, between 0 and 1, and `longest_without_step` without a step. Both,
    and `steps_lost`, are None if the program makes no commits that the driver knows of; `steps_lost` also if one fault's are not
    known. `withheld`: how many faults were not injected, and `withheld_because` of the last one. `ended`: why no more faults
    are injected.
    """

    cluster: str
    seed: int
    begun: float
    seconds: float
    faults: tuple[FaultOutcome, ...]
    goodput: float | None
    longest_without_step: float | None
    steps_lost: int | None
    withheld: int
    withheld_because: str
    ended: str

    @property
    def not_survived(self) -> tuple[FaultOutcome, ...]:
        return tuple(fault for fault in self.faults if fault.survived is False)

    def __repr__(self) -> str:
        """The figures, a table of the faults by kind, and what was not survived."""
        table = text_table(_COLUMNS, _rows(self.faults))
        return "\n".join([self._headline(), *([table] if table else []), *self._lines()])

    def _repr_html_(self) -> str:
        lines = "".join(f"<div>{escape(line)}</div>" for line in self._lines())
        table = html_table("Injected faults", _COLUMNS, _rows(self.faults))
        return f"<div><strong>{escape(self._headline())}</strong>{table}{lines}</div>"

    def _headline(self) -> str:
        survived = sum(fault.survived is True for fault in self.faults)
        unknown = sum(fault.survived is None for fault in self.faults)
        count = f"{survived} of {len(self.faults)} faults survived{f', {unknown} not known,' if unknown else ''}"
        return f"chaos on {self.cluster}: {count} in {seconds_text(self.seconds)} (seed {self.seed})"

    def _lines(self) -> list[str]:
        if self.goodput is None:
            figures = "goodput, times without a step and lost steps are not known: the program makes no commits"
        else:
            still = seconds_text(self.longest_without_step or 0.0)
            lost = "lost steps are not known" if self.steps_lost is None else _lost(self.steps_lost)
            figures = f"goodput {self.goodput:.2%} · longest time without a step {still} · {lost}"
        times = "once" if self.withheld == 1 else f"{self.withheld} times"
        withheld = [f"withheld {times}: {self.withheld_because}"] if self.withheld else []
        others = [str(fault) for fault in self.faults if fault.survived is None or fault in self.not_survived]
        return [figures, *others, *withheld, f"ended: {self.ended}"]


def _lost(steps: int) -> str:
    return f"{steps} step{'' if steps == 1 else 's'} lost"


def outcomes(records: Sequence[EventRecord], unresolved: tuple[bool | None, str] = (None, "")) -> list[FaultOutcome]:
    """What each fault among these records led to. The records are of one job, in order.

    `unresolved`: `survived` and `why` of those of which the records show nothing.
    """
    found: list[FaultOutcome] = []
    recoveries: set[int] = set()  # of earlier faults: the steps that one recovery lost count once
    for i, record in enumerate(records):
        kind = _kind(record)
        if kind is None:
            continue
        fault = record.time, kind, record.host, record.worker
        end = _end_of(record, range(i + 1, len(records)), records)
        if end is None:
            found.append(FaultOutcome(*fault, unresolved[0], None, None, unresolved[1]))
        elif records[end].kind == "training":
            lost = 0 if end in recoveries else records[end].lost
            found.append(FaultOutcome(*fault, True, max(0.0, records[end].time - record.time), lost, ""))
            recoveries.add(end)
        else:
            found.append(FaultOutcome(*fault, _ENDS[records[end].kind], None, None, records[end].text))
    return found


def _end_of(fault: EventRecord, later: Iterable[int], records: Sequence[EventRecord]) -> int | None:
    """Where a later generation makes its first step, or the job ends."""
    for i in later:
        kind, generation = records[i].kind, records[i].generation
        if kind in _ENDS or (kind == "training" and generation > fault.generation):
            return i
    return None


def report(
    records: Sequence[EventRecord],
    *,
    cluster: str,
    seed: int,
    begun: float,
    end: float,
    withheld: int,
    withheld_because: str,
    ended: str,
    steps_known: bool,
    unresolved: tuple[bool | None, str] = (None, ""),
) -> ChaosReport:
    """The report about the time from `begun` to `end`, of which these are the records."""
    faults, seconds = tuple(outcomes(records, unresolved)), max(end - begun, 1e-9)
    still = list(_times_without_step(records, faults, begun, end))
    return ChaosReport(
        cluster,
        seed,
        begun,
        seconds,
        faults,
        1 - sum(last - first for first, last in still) / seconds if steps_known else None,
        max((last - first for first, last in still), default=0.0) if steps_known else None,
        _steps_lost(faults) if steps_known else None,
        withheld,
        withheld_because,
        ended,
    )


def seconds_text(seconds: float) -> str:
    """`0.06 s`, `4.1 s`, `75 s` or `10 min`."""
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _steps_lost(faults: Iterable[FaultOutcome]) -> int | None:
    """The sum; None if that of a fault after which a step was made is not known."""
    lost = [fault.steps_lost for fault in faults if fault.recovery is not None]
    return None if None in lost else sum(each or 0 for each in lost)


def _kind(record: EventRecord) -> FaultKind | None:
    return next((kind for kind in KINDS if record.kind == f"fault-{kind}"), None)


def _times_without_step(
    records: Iterable[EventRecord], faults: Iterable[FaultOutcome], begun: float, end: float
) -> list[tuple[float, float]]:
    """The times without a step, which do not overlap: from faults to their next steps, and planned changes of the world.

    In the phases `prepare` and `leave` of a planned change the members train on.
    """
    spans = [(fault.time, end if fault.recovery is None else fault.time + fault.recovery) for fault in faults]
    for record in records:
        took = record.took
        if record.kind == "training" and "all" in took:
            spans.append((record.time - (took["all"] - took.get("leave", 0.0)) / 1000, record.time))
    merged: list[tuple[float, float]] = []
    for first, last in sorted((max(first, begun), min(last, end)) for first, last in spans):
        if last <= first:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return merged


def _rows(faults: Iterable[FaultOutcome]) -> Iterable[tuple[str, ...]]:
    """Return a row for each kind of fault."""
    for kind, same in groupby(sorted(faults, key=lambda fault: KINDS.index(fault.kind)), key=lambda fault: fault.kind):
        each = list(same)
        times = [fault.recovery for fault in each if fault.recovery is not None]
        lost = _steps_lost(each)
        middle, most = (seconds_text(median(times)), seconds_text(max(times))) if times else ("–", "–")
        survived = sum(fault.survived is True for fault in each)
        yield kind, str(len(each)), str(survived), middle, most, str(lost) if times and lost is not None else "–"
