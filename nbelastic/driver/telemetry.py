"""What the driver has heard and noted beside the world: samples, progress, reports, orders of people."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence

from msgspec import Struct

from nbelastic.protocol import agent_messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.status import OrderStatus

NAN = float("nan")
BEHIND = 2.0  # seconds for which others must have been ahead: most workers report once a second
CURVES = 4  # values whose history is kept
POINTS = 100  # of a history
LARGEST = 2**53  # of a number of steps: a page of a browser knows no larger whole numbers
IDLE = 5.0  # seconds without CPU time after which a process is idle
IDLE_BELOW = 5.0  # percent of a core: threads that wait for Python's interpreter lock use a little


def numbers(report: Mapping[str, float | str | None]) -> dict[str, float | str]:
    """As it was before JSON, which has no number for what is infinite or none."""
    return {name: NAN if value is None else value for name, value in report.items()}


def _not_finite(report: Mapping[str, float | str]) -> list[str]:
    return [name for name, value in report.items() if not isinstance(value, str) and not math.isfinite(value)]


class HostSample(Struct, frozen=True):
    """As of `HostStatus`."""

    cpu: float
    memory: int
    memory_total: int
    gpus: tuple[tuple[int, int, int], ...]


class SavedTelemetry(Struct, frozen=True):
    """What of it another driver cannot ask for. `curves`: points, and how many reports each stands for."""

    step: int = 0
    report: dict[str, float | str | None] = {}
    total: int | None = None
    failed_at: float | None = None
    curves: dict[str, tuple[list[float | None], int]] = {}


class Telemetry(Struct):
    """What the driver has heard beside the world: samples and progress.

    Written in the driver's thread, read by `snapshot` in any: what is iterated over is replaced, never changed.
    """

    host_samples: dict[str, HostSample] = {}
    worker_samples: dict[str, tuple[float, int]] = {}
    computed_at: dict[str, float] = {}  # when each worker's process was last seen to use CPU time
    blocked: dict[str, float] = {}  # as of `AgentSample`
    steps: dict[WorkerId, int] = {}
    step: int = 0  # the newest commit of the present or last job
    report: dict[str, float | str] = {}
    not_finite: frozenset[str] = frozenset()  # names of this job's reports that were not a number, or infinite
    total: int | None = None
    last_generation: int = 0  # of the jobs before the present one
    newest: tuple[tuple[float, int], ...] = ()  # when which commit was first heard of
    curves: dict[str, Curve] = {}
    steps_per_second: float | None = None
    failed_at: float | None = None
    orders: list[OrderStatus] = []
    stacks: dict[WorkerId, worker_messages.StackShown] = {}  # each worker's last
    asked: int = 0  # the number of the last question for stacks
    log_dir: str = ""
    jobs: dict[str, str] = {}  # how the batch jobs stand whose agents have not spoken yet, by host

    def progress(self, commit: int, now: float) -> None:
        """Some worker has made this commit."""
        if commit > self.step:
            self.step = commit
            recent = [i for i, (at, _) in enumerate(self.newest) if at >= now - BEHIND]
            oldest = max(0, recent[0] - 1) if recent else max(0, len(self.newest) - 1)
            self.newest = (*self.newest[oldest:], (now, commit))

    def sample_of(self, message: agent_messages.AgentSample, known: Container[WorkerId], now: float) -> None:
        """An agent has measured its host and its workers, of which some may have died since."""
        of = {name: sample for name, sample in message.workers.items() if WorkerId.parse(name) in known}
        self.computed_at.update((name, now) for name, (cpu, _) in of.items() if cpu >= IDLE_BELOW)
        others = {name: seconds for name, seconds in self.blocked.items() if name not in message.workers}
        self.blocked = {**others, **{name: seconds for name, seconds in message.blocked.items() if name in of}}
        self.host_samples[message.host] = HostSample(message.cpu, message.memory, message.of, message.gpus)
        self.worker_samples.update(of)

    def idle(self, w: WorkerId, now: float) -> bool:
        """Whether its process has used no CPU time for a while."""
        return now - self.computed_at.get(str(w), -IDLE) >= IDLE

    def blocked_text(self, w: WorkerId) -> str:
        """What to say of a main thread that is in uninterruptible sleep; else nothing."""
        seconds = self.blocked.get(str(w))
        if seconds is None:
            return ""
        return f"is in uninterruptible sleep (D) for {seconds:.0f} s: it waits for a device or a file system"

    def report_of(self, values: Mapping[str, float | str]) -> tuple[str, ...]:
        """Take what rank 0 has reported; `total` is ours. Returns the names that are not finite for the first time."""
        self.report = dict(values)
        total = self.report.pop("total", None)
        known = isinstance(total, float | int) and 0 < total < LARGEST
        self.total = int(total) if total is not None and known else None
        for name, value in list(self.report.items())[:CURVES]:
            if isinstance(value, str):
                continue
            if name not in self.curves:
                self.curves = {**self.curves, name: Curve()}
            self.curves[name].add(value)
        fresh = tuple(name for name in _not_finite(self.report) if name not in self.not_finite)
        self.not_finite |= set(fresh)
        return fresh

    def begin_job(self, last_generation: int = 0) -> None:
        """What was measured, and what is heard of generations up to `last_generation`, belongs to the job before."""
        self.last_generation = last_generation
        self.step, self.report, self.steps_per_second, self.total = 0, {}, None, None
        self.newest, self.curves, self.not_finite = (), {}, frozenset()

    def saved(self) -> SavedTelemetry:
        """For another driver."""
        curves = {name: curve.saved() for name, curve in self.curves.items()}
        return SavedTelemetry(self.step, dict(self.report), self.total, self.failed_at, curves)

    def recall(self, saved: SavedTelemetry) -> None:
        """As another driver has left it."""
        self.step, self.total, self.failed_at = saved.step, saved.total, saved.failed_at
        self.report = numbers(saved.report)
        self.not_finite = frozenset(_not_finite(self.report))
        self.curves = {name: Curve(*of) for name, of in saved.curves.items()}

    def behind(self, w: WorkerId, now: float) -> int:
        """How many commits others had made BEHIND seconds ago and this one has not."""
        own = self.steps.get(w)
        if own is None:
            return 0
        then = max((commit for at, commit in self.newest if at <= now - BEHIND), default=0)
        return max(0, then - own)


class Curve:
    """A value's history in at most `POINTS` points, each the mean of equally many reports."""

    def __init__(self, points: Sequence[float | None] = (), each: int = 1) -> None:
        self._points = [NAN if point is None else point for point in points]
        self._each = each  # reports a point
        self._sum, self._count = 0.0, 0  # of the point that is being made

    def add(self, value: float) -> None:
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._each:
            return
        self._points.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._points) == POINTS:
            self._points = [(a + b) / 2 for a, b in zip(self._points[::2], self._points[1::2], strict=True)]
            self._each *= 2

    def saved(self) -> tuple[list[float | None], int]:
        """The points, and how many reports each stands for."""
        return list(self._points), self._each

    @property
    def points(self) -> tuple[float, ...]:
        return tuple(self._points)
