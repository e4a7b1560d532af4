"""What losses have cost the present or last job: steps, and time without training. Pure functions of the events."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from nbelastic.protocol.status import JOB_ENDS, EventRecord


class JobSummary(Struct, frozen=True):
    """Times are in seconds since 1970.

    `failures`: breaks of the world after which it trains again. `lost`: commits that had to be made again; None: not known.
    `ended`: 0.0 while the job runs. `idle`: seconds without training so far, pauses left out; `idle_since`: when the present
    such time began, `paused_since`: when the present pause began, 0.0: it trains. `resumed`: when the last pause ended.
    """

    started: float
    failures: int = 0
    lost: int | None = 0
    ended: float = 0.0
    idle: float = 0.0
    idle_since: float = 0.0
    paused: float = 0.0
    paused_since: float = 0.0
    resumed: float = 0.0
    has_trained: bool = False

    def trained_share(self, now: float) -> float | None:
        """Which share of its time the job has trained, without pauses; None before its first step."""
        end = self.ended or now
        paused = self.paused + (end - self.paused_since if self.paused_since else 0.0)
        idle = self.idle + self.idle_until(end)
        whole = end - self.started - paused
        if not self.has_trained or whole <= 0:
            return None
        return min(1.0, max(0.0, 1 - idle / whole))

    def idle_until(self, now: float) -> float:
        """Seconds of the present time without training, up to a pause that has begun since."""
        return max(0.0, (self.paused_since or now) - self.idle_since) if self.idle_since else 0.0


def job_summary(events: Sequence[EventRecord]) -> JobSummary | None:
    """The summary of the newest job in the events; None if its beginning is not among them."""
    start = next((i for i in range(len(events) - 1, -1, -1) if events[i].kind == "job-started"), None)
    if start is None:
        return None
    found, breaks = JobSummary(events[start].time, idle_since=events[start].time), 0
    for event in events[start + 1 :]:
        breaks = breaks + 1 if event.kind == "world-broken" else 0 if event.kind == "training" else breaks
        found = _after(found, event)
    return replace(found, failures=found.failures - breaks)  # the present ones are not over


def _after(known: JobSummary, event: EventRecord) -> JobSummary:
    match event.kind:
        case "training":
            took = event.took.get("all", 0.0) / 1000
            begun = min(known.idle_since or event.time, event.time - took)
            if not known.has_trained:
                begun = known.idle_since
            lost = known.lost
            if "abort" in event.took:
                lost = None if lost is None or event.lost is None else lost + event.lost
            idle = known.idle + max(0.0, (known.paused_since or event.time) - max(begun, known.resumed))
            return replace(known, idle=idle, idle_since=0.0, lost=lost, has_trained=True)
        case "world-broken":
            return replace(known, failures=known.failures + 1, idle_since=known.idle_since or event.time)
        case "paused":
            return replace(known, paused_since=known.paused_since or event.time)
        case "resumed" if known.paused_since:
            return replace(
                known,
                idle=known.idle + known.idle_until(event.time),
                idle_since=event.time if known.idle_since else 0.0,
                paused=known.paused + event.time - known.paused_since,
                paused_since=0.0,
                resumed=event.time,
            )
        case kind if kind in JOB_ENDS and not known.ended:
            return replace(known, ended=event.time)
    return known
