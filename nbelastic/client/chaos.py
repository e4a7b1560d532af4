"""Injects faults into a cluster at random moments, and watches what they lead to."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import get_args

from msgspec import Struct

from nbelastic.client.chaos_report import ChaosReport, outcomes, report
from nbelastic.client.driver_link import DriverLink
from nbelastic.client.subscriptions import Subscriptions
from nbelastic.errors import ClusterStoppedError, UsageError, WaitTimeoutError
from nbelastic.protocol.chaos import KINDS, FaultKind, pause_before
from nbelastic.protocol.requests import RequestFault
from nbelastic.protocol.status import JOB_ENDS, EventRecord
from nbelastic.protocol.timeouts import DRIVER_START
from nbelastic.system.argument_types import SECONDS, WHOLE, check_kind, check_optional

CHECK_INTERVAL = 1.0  # seconds between two looks if no change is reported, and between two tries of a fault
SETTLE = 60.0  # seconds in which the last faults may be recovered from
LATE = 5.0  # seconds without a step after which a line says so


class Plan(Struct, frozen=True):
    """When faults are injected, and which. Times in seconds; `duration` None: until the job ends."""

    every: float
    kinds: tuple[FaultKind, ...]
    duration: float | None
    seed: int
    below_min: bool
    by: str


def plan(
    *, every: float, kinds: str | Sequence[str], duration: float | None, seed: int | None, below_min: bool, by: str
) -> Plan:
    """The checked arguments of `Cluster.chaos`. UsageError for a wrong one."""
    check_kind("every", every, SECONDS)
    check_optional("duration", duration, SECONDS)
    check_optional("seed", seed, WHOLE)
    for name, seconds in (("every", every), ("duration", duration)):
        if seconds is not None and not 0 < seconds < float("inf"):
            raise UsageError(f"{name}={seconds:g}: give a number of seconds greater than 0.")
    given = [kinds] if isinstance(kinds, str) else list(kinds)
    wrong = [kind for kind in given if kind not in get_args(FaultKind)]
    if wrong or not given:
        raise UsageError(f"kinds: {', '.join(map(str, wrong)) or 'none'} given; choose among {', '.join(KINDS)}.")
    chosen = tuple(kind for kind in KINDS if kind in given)
    return Plan(
        float(every), chosen, duration, secrets.randbelow(1 << 31) if seed is None else seed, bool(below_min), by
    )


class Chaos:
    """One run of chaos. `show(line)` gets a line per fault, and one if the next step is late."""

    def __init__(
        self,
        link: DriverLink,
        subscriptions: Subscriptions,
        events: Callable[[], list[EventRecord]],
        plan: Plan,
        show: Callable[[str], object],
    ) -> None:
        self._link, self._subscriptions, self._events, self._plan, self._show = link, subscriptions, events, plan, show
        self._records: list[EventRecord] = []  # since the beginning
        self._steps_known = False
        self._newest: EventRecord | None = None  # of all records so far
        self._shown: set[float] = set()  # times of faults whose outcome was shown
        self._late: set[float] = set()  # the same of those that were shown as late
        self._withheld, self._withheld_because = 0, ""
        self._number = 0  # of the newest fault that is due
        self._injected = 0  # faults, as the driver has answered
        self._lost_at = 0.0  # when the driver was found lost; 0.0: it runs

    def run(self) -> ChaosReport:
        """Inject faults until the time is over, the job or the cluster has ended, or Ctrl-C. UsageError if they are not allowed."""
        self._ask(is_check=True)
        earlier = self._events()
        self._newest = earlier[-1] if earlier else None
        job = next((i for i, each in reversed(list(enumerate(earlier))) if each.kind == "job-started"), 0)
        self._steps_known = any(each.kind == "training" for each in earlier[job:])
        begun = time.time()
        changed = threading.Event()
        end = self._subscriptions.add(lambda _: changed.set())
        unresolved: tuple[bool | None, str] = (None, "no step was made before the chaos ended")
        ended = "interrupted"
        try:
            ended = self._inject(changed)
            unresolved = self._settle(changed)
        except KeyboardInterrupt:
            pass  # a worker that was stopped is killed all the same: by the driver or, later, by its host's agent
        finally:
            end()
        self._collect()
        if not self._steps_known:
            unresolved = None, "the job goes on, and makes no commits that show its steps"
        return report(
            self._records,
            cluster=self._link.name,
            seed=self._plan.seed,
            begun=begun,
            end=time.time(),
            withheld=self._withheld,
            withheld_because=self._withheld_because,
            ended=ended,
            steps_known=self._steps_known,
            unresolved=unresolved,
        )

    def _inject(self, changed: threading.Event) -> str:
        """Inject one fault after the other. Returns why it ended."""
        plan = self._plan
        end = time.monotonic() + plan.duration if plan.duration is not None else float("inf")
        while not self._over() and time.monotonic() < end:
            self._number += 1
            self._wait_until(changed, min(end, time.monotonic() + self._pause(self._number)))
            give_up = min(end, time.monotonic() + self._pause(self._number + 1))
            refusal = ""
            while not self._over() and time.monotonic() < give_up and (refusal := self._ask()):
                self._wait_until(changed, min(give_up, time.monotonic() + CHECK_INTERVAL))
            if refusal and not self._over():
                self._withheld, self._withheld_because = self._withheld + 1, refusal
                self._show(f"{_clock(time.time())} fault {self._number} is withheld: {refusal}")
        return self._over() or f"{plan.duration:g} s are over"

    def _pause(self, number: int) -> float:
        return pause_before(self._plan.seed, number, self._plan.every)

    def _wait_until(self, changed: threading.Event, until: float) -> None:
        """Wait until this moment, or until no fault can be injected any more."""
        while (left := until - time.monotonic()) > 0 and not self._over():
            changed.wait(min(CHECK_INTERVAL, left))
            changed.clear()

    def _settle(self, changed: threading.Event) -> tuple[bool | None, str]:
        """Wait for the outcomes of the last faults. Returns what is known of those that have none in time."""
        end = time.monotonic() + SETTLE
        while not self._over() and self._steps_known and self._has_unresolved():
            if time.monotonic() >= end:
                return False, f"no step within {SETTLE:g} s: {self._link.status().reason}"
            changed.wait(CHECK_INTERVAL)
            changed.clear()
        return None, self._over()

    def _has_unresolved(self) -> bool:
        """Whether a fault has no outcome yet, or is not in the event log yet."""
        found = outcomes(self._records)
        return len(found) < self._injected or any(each.survived is None for each in found)

    def _ask(self, *, is_check: bool = False) -> str:
        """Why the fault is not possible now; empty: it was injected."""
        plan = self._plan
        request = RequestFault(plan.by, plan.kinds, plan.seed, self._number, plan.below_min, is_check)
        try:
            refusal: str = self._link.ask(request)
        except (ClusterStoppedError, WaitTimeoutError) as error:  # another driver may take over
            if is_check:
                raise
            return str(error)
        except UsageError:
            if is_check or not self._over():
                raise
            return "the job has ended"
        self._injected += not (is_check or refusal)
        return refusal

    def _over(self) -> str:
        """Why no fault can be injected any more; empty: one can."""
        self._collect()
        found = next((each.text for each in self._records if each.kind in JOB_ENDS), "")
        if found:
            return found
        try:
            self._link.running()
        except ClusterStoppedError as error:
            self._lost_at = self._lost_at or time.monotonic()
            is_replaced = self._link.is_lost and time.monotonic() - self._lost_at < DRIVER_START
            return "" if is_replaced else str(error)
        self._lost_at = 0.0
        return ""

    def _collect(self) -> None:
        """Take new records, and show the outcomes that they have."""
        events = self._events()
        newest = self._newest
        known = next((i for i in range(len(events) - 1, -1, -1) if events[i] == newest), -1)
        new = events[known + 1 :]
        if known < 0 and newest is not None:  # another driver has read a log without it: the disk was full
            new = [each for each in events if each.time > newest.time]
        self._newest = events[-1] if events else None
        self._records += new
        self._steps_known = self._steps_known or any(each.kind == "training" for each in new)
        for fault in outcomes(self._records):
            if fault.time in self._shown:
                continue
            if fault.survived is not None or fault.why:
                self._shown.add(fault.time)
                self._show(f"{_clock(fault.time)} {fault}")
            elif self._steps_known and time.time() - fault.time > LATE and fault.time not in self._late:
                self._late.add(fault.time)
                self._show(
                    f"{_clock(fault.time)} {fault.kind} {fault.victim}: no step yet: {self._link.status().reason}"
                )


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
