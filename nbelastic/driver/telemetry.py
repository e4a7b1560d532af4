"""Samples, progress, reports and stack dumps of workers: what the status shows beside the cluster state."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Mapping, Sequence

import msgspec
from msgspec import Struct

from nbelastic.core.replicas import differs_text
from nbelastic.driver.replicas import Replicas
from nbelastic.driver.slow_ranks import SlowRanks
from nbelastic.driver.step_time_table import StepTimeTable
from nbelastic.protocol import agent_messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.report_history import MAX_NAMES, ReportHistory, ReportRows
from nbelastic.protocol.status import GpuStatus, RequestStatus

NAN = float("nan")
BEHIND_TIME = 2.0  # seconds that others must have been ahead, because most workers report once a second
MAX_CURVES = 4  # of one report; of a job MAX_NAMES
MAX_WORLDS = 8
MAX_POINTS = 100  # of a curve
LARGEST_TOTAL = 2**53  # JavaScript has no larger integers
IDLE_TIME = 5.0  # seconds without CPU time after which a process is idle
IDLE_CPU = 5.0  # percent of a core; threads that wait for Python's interpreter lock use a little


def numbers(report: Mapping[str, float | str | None]) -> dict[str, float | str]:
    """The values of a report before JSON, which writes null for numbers that are not finite."""
    return {name: NAN if value is None else value for name, value in report.items()}


def _not_finite(report: Mapping[str, float | str]) -> list[str]:
    return [name for name, value in report.items() if not isinstance(value, str) and not math.isfinite(value)]


class HostSample(Struct, frozen=True):
    """The sample of a host, as `HostStatus` shows it."""

    cpu: float
    memory: int
    memory_total: int
    gpus: tuple[GpuStatus, ...]
    throttled: tuple[str, ...] = ()  # GPUs that run slower than they could, and why


class WholeCommit(Struct, frozen=True):
    """The newest whole commit of a sharded model. `made_at`: by the machine's monotonic clock; `seconds`: that copying took."""

    generation: int
    commit: int
    made_at: float
    seconds: float


class NewestCheckpoint(Struct, frozen=True):
    """The newest checkpoint. `commit`: None: there is none yet. `made_at`: by the machine's monotonic clock. `size`: bytes."""

    every: int
    commit: int | None = None
    made_at: float = 0.0
    size: int = 0


class SavedTelemetry(Struct, frozen=True):
    """What the next driver cannot learn from the workers. `curves`: the points, and how many reports each one averages."""

    step: int = 0
    report: dict[str, float | str | None] = {}
    total: int | None = None
    failed_at: float | None = None
    curves: dict[str, tuple[list[float | None], int]] = {}


class SavedReports(Struct, frozen=True):
    """The history of the job's reports, and how many reports each of its rows averages."""

    history: ReportRows
    reports_per_row: int


class StepRate:
    """Steps per second over the last seconds."""

    def __init__(self, window: float = 5.0) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._window = window

    def measure(self, now: float, steps: int) -> float | None:
        """The rate, given the number of steps at `now`; None if the time is too short to measure it."""
        if self._seen and steps < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, steps))
        while now - self._seen[0][0] > self._window:
            self._seen.popleft()
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end - start) if end - start >= 0.2 else None


class Telemetry(Struct):
    """Samples and progress of the cluster.

    The driver's thread writes it, and `status.snapshot` reads it in any thread. A container that is iterated over is replaced, never changed.
    """

    host_samples: dict[str, HostSample] = {}
    worker_samples: dict[str, tuple[float, int]] = {}
    computed_at: dict[str, float] = {}  # when each worker's process last used CPU time
    blocked: dict[str, float] = {}  # see `AgentSample`
    steps: dict[WorkerId, int] = {}
    step: int = 0  # the newest commit of the present or last job
    report: dict[str, float | str] = {}
    not_finite: frozenset[str] = frozenset()  # reported names of this job whose values were not finite
    total: int | None = None
    last_generation: int = 0  # of earlier jobs
    newest: tuple[tuple[float, int], ...] = ()  # when each of the newest commits was first reported
    curves: dict[str, Curve] = {}
    history: ReportHistory = msgspec.field(default_factory=ReportHistory)
    copies: dict[WorkerId, tuple[int, worker_messages.Copies]] = {}  # with the generation whose ranks they name
    whole: WholeCommit | None = None
    checkpoint: NewestCheckpoint | None = None  # of jobs with checkpoints
    worlds: dict[int, tuple[WorkerId, ...]] = {}  # by generation, the members of the last ones that had copies
    replicas: Replicas = msgspec.field(default_factory=Replicas)
    slow_ranks: SlowRanks = msgspec.field(default_factory=SlowRanks)
    step_times: StepTimeTable = msgspec.field(default_factory=StepTimeTable)
    steps_per_second: float | None = None
    failed_at: float | None = None
    step_rate: StepRate = msgspec.field(default_factory=StepRate)
    requests: list[RequestStatus] = []  # by buttons of the dashboard
    stacks: dict[WorkerId, worker_messages.StackShown] = {}  # the newest of each worker
    stack_requests: int = 0  # how often stacks were requested
    log_dir: str = ""
    batch_jobs: dict[str, str] = {}  # the states of batch jobs whose agents have not connected yet, by host

    def add_commit(self, commit: int, now: float) -> None:
        """A worker has made this commit."""
        if commit > self.step:
            self.step = commit
            recent = [i for i, (at, _) in enumerate(self.newest) if at >= now - BEHIND_TIME]
            oldest = max(0, recent[0] - 1) if recent else max(0, len(self.newest) - 1)
            self.newest = (*self.newest[oldest:], (now, commit))

    def add_sample(self, message: agent_messages.AgentSample, known: Container[WorkerId], now: float) -> None:
        """Take an agent's sample of its host and its workers. Workers that were lost since are left out."""
        alive = {name: sample for name, sample in message.workers.items() if WorkerId.parse(name) in known}
        self.computed_at.update((name, now) for name, (cpu, _) in alive.items() if cpu >= IDLE_CPU)
        others = {name: seconds for name, seconds in self.blocked.items() if name not in message.workers}
        self.blocked = {**others, **{name: seconds for name, seconds in message.blocked.items() if name in alive}}
        self.host_samples[message.host] = HostSample(
            message.cpu, message.memory, message.memory_total, message.gpus, message.throttled
        )
        self.worker_samples.update(alive)

    def is_idle(self, w: WorkerId, now: float) -> bool:
        """Whether the worker's process has used no CPU time for `IDLE_TIME` seconds."""
        return now - self.computed_at.get(str(w), -IDLE_TIME) >= IDLE_TIME

    def blocked_text(self, w: WorkerId) -> str:
        """A text if the worker's main thread is in uninterruptible sleep, else an empty one."""
        seconds = self.blocked.get(str(w))
        if seconds is None:
            return ""
        return f"is in uninterruptible sleep (D) for {seconds:.0f} s: it waits for a device or a file system"

    def differs_text(self, w: WorkerId) -> str:
        """A text if the worker's training state differs from the other ranks', else an empty one."""
        commit = self.replicas.differing.get(w)
        return differs_text(commit) if commit is not None else ""

    def add_report(self, values: Mapping[str, float | str]) -> tuple[str, ...]:
        """Take what rank 0 has reported. Returns the names whose values are not finite for the first time.

        The name `total` is reserved: it is the number of steps of the whole job.
        """
        self.report = dict(values)
        total = self.report.pop("total", None)
        is_valid = isinstance(total, float | int) and 0 < total < LARGEST_TOTAL
        self.total = int(total) if total is not None and is_valid else None
        for name, value in list(self.report.items())[:MAX_CURVES]:
            if isinstance(value, str) or (name not in self.curves and len(self.curves) >= MAX_NAMES):
                continue
            if name not in self.curves:
                self.curves = {**self.curves, name: Curve()}
            self.curves[name].add(value)
        new = tuple(name for name in _not_finite(self.report) if name not in self.not_finite)
        self.not_finite |= set(new)
        return new

    def add_copies(
        self, w: WorkerId, generation: int, copies: worker_messages.Copies, now: float, *, is_rank_0: bool
    ) -> None:
        """Take what a worker has reported about copies of a sharded model. Only rank 0's whole commit counts."""
        self.copies[w] = generation, copies
        before, commit = self.whole, copies.whole
        if (
            is_rank_0
            and commit is not None
            and (before is None or (generation, commit) > (before.generation, before.commit))
        ):
            self.whole = WholeCommit(generation, commit, now - copies.age, copies.seconds)

    def add_checkpoint(self, found: worker_messages.Checkpoint, now: float) -> None:
        """Take what rank 0 has reported about checkpoints. A new rank 0 may know of none, or of older ones."""
        known = self.checkpoint.commit if self.checkpoint is not None else None
        if self.checkpoint is None or (found.commit is not None and (known is None or found.commit > known)):
            self.checkpoint = NewestCheckpoint(found.every, found.commit, now - found.age, found.size)

    def add_world(self, generation: int, members: tuple[WorkerId, ...]) -> None:
        """These workers train in this generation."""
        if generation not in self.worlds:
            self.worlds = {**dict(list(self.worlds.items())[1 - MAX_WORLDS :]), generation: members}

    def continued_text(self, continued: worker_messages.Continued) -> str:
        """Describe from which commit a world continues, and whose copies it uses."""
        world = self.worlds.get(continued.generation, ())
        lost = [str(world[r]) if 0 <= r < len(world) else f"rank {r}" for r in continued.lost]
        return f"world of {continued.size} continues from commit {continued.commit}" + (
            f" (copies of {', '.join(lost)})" if lost else ""
        )

    def begin_job(self, last_generation: int = 0) -> None:
        """Forget the previous job's progress. Later messages of generations up to `last_generation` belong to that job."""
        self.last_generation = last_generation
        self.step, self.report, self.steps_per_second, self.total = 0, {}, None, None
        self.newest, self.curves, self.not_finite = (), {}, frozenset()
        self.history = ReportHistory()
        self.copies, self.whole, self.worlds, self.checkpoint = {}, None, {}, None
        self.step_rate, self.replicas, self.slow_ranks = StepRate(), Replicas(), SlowRanks()
        self.step_times = StepTimeTable()

    def measure_speed(self, now: float, commit: int) -> None:
        """Rank 0 has made this commit."""
        self.steps_per_second = self.step_rate.measure(now, commit)

    def forget_worker(self, w: WorkerId) -> None:
        self.steps.pop(w, None)
        self.copies.pop(w, None)
        self.replicas.differing.pop(w, None)
        self.slow_ranks.forget(w)
        self.worker_samples.pop(str(w), None)
        self.computed_at.pop(str(w), None)
        self.blocked.pop(str(w), None)
        self.stacks.pop(w, None)

    def saved(self) -> SavedTelemetry:
        """What the next driver needs."""
        curves = {name: curve.saved() for name, curve in self.curves.items()}
        return SavedTelemetry(self.step, dict(self.report), self.total, self.failed_at, curves)

    def saved_reports(self) -> SavedReports:
        """The reports, which are saved less often than the rest."""
        return SavedReports(self.history.since("", 0), self.history.reports_per_row)

    def load_reports(self, saved: SavedReports) -> None:
        self.history = ReportHistory(saved.history, max(1, saved.reports_per_row))

    def load(self, saved: SavedTelemetry) -> None:
        """Continue with the telemetry of the previous driver."""
        self.step, self.total, self.failed_at = saved.step, saved.total, saved.failed_at
        self.report = numbers(saved.report)
        self.not_finite = frozenset(_not_finite(self.report))
        self.curves = {name: Curve(*curve) for name, curve in saved.curves.items()}

    def behind(self, w: WorkerId, now: float) -> int:
        """How many commits other workers had made BEHIND_TIME seconds ago that this one has not made yet."""
        own = self.steps.get(w)
        if own is None:
            return 0
        others = max((commit for at, commit in self.newest if at <= now - BEHIND_TIME), default=0)
        return max(0, others - own)


class Curve:
    """A value's history in at most `MAX_POINTS` points. Each point is the mean of the same number of reports."""

    def __init__(self, points: Sequence[float | None] = (), reports_per_point: int = 1) -> None:
        self._points = [NAN if point is None else point for point in points]
        self._reports_per_point = reports_per_point
        self._sum, self._count = 0.0, 0  # of the next point

    def add(self, value: float) -> None:
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._reports_per_point:
            return
        self._points.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._points) == MAX_POINTS:
            self._points = [(a + b) / 2 for a, b in zip(self._points[::2], self._points[1::2], strict=True)]
            self._reports_per_point *= 2

    def saved(self) -> tuple[list[float | None], int]:
        """The points, and how many reports each one averages."""
        return list(self._points), self._reports_per_point

    @property
    def points(self) -> tuple[float, ...]:
        return tuple(self._points)
