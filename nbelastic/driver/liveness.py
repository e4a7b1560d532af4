"""What is not heard: agents, workers, and commits of a world that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from nbelastic.core import commands as cmd
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId

if TYPE_CHECKING:
    from nbelastic.core.state import ClusterState
    from nbelastic.driver.agents import Fleet
    from nbelastic.driver.clock import Clock
    from nbelastic.protocol.settings import Settings

LATE = 2.0  # seconds by which a look may be late; later than that, the driver itself was away
AGAIN = 1.0  # seconds between words of the same standing still
QUIET = 3.0  # heartbeats without a word of a host after which nothing is made of its workers' silence
USUAL = 5.0  # times the generation's usual time from commit to commit: that long is no standing still


class Commits:
    """When the world that runs made its last commit."""

    def __init__(self) -> None:
        self._seen = (0, -1)  # generation and commits
        self._at = 0.0
        self._first = (0, 0.0)  # commits when the generation was first heard of, and when
        self._told_at = 0.0

    def made(self, generation: int, count: int, now: float) -> None:
        if (generation, count) <= self._seen:
            return
        if generation != self._seen[0]:
            self._first = (count, now)
        self._seen, self._at = (generation, count), now

    def _usual(self) -> float:
        """Seconds from commit to commit in this generation."""
        made = self._seen[1] - self._first[0]
        return (self._at - self._first[1]) / made if made > 0 else 0.0

    def news(self, generation: int, patience: float, now: float) -> ev.StallDetected | ev.StallResolved | None:
        """What there is to say of the world of `generation`, which runs."""
        if generation != self._seen[0]:
            self._seen, self._at, self._told_at, self._first = (generation, -1), now, 0.0, (0, now)
        if now - self._at <= max(patience, USUAL * self._usual()):
            was_told, self._told_at = self._told_at, 0.0
            return ev.StallResolved(generation) if was_told else None
        if now - self._told_at < AGAIN:
            return None
        self._told_at = now
        return ev.StallDetected(generation, now - self._at)


class Liveness:
    """Lives in the driver's thread."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        clock: Clock,
        cluster: Callable[[], ClusterState],
        *,
        post: Callable[[ev.Event], None],
        record: Callable[[cmd.Record], None],
    ) -> None:
        self._silence, self._interval = settings.silence, settings.heartbeat
        self._fleet, self._clock, self._cluster, self._post, self._record = fleet, clock, cluster, post, record
        self._absent = 0.0  # seconds of absences of the driver so far
        self._silent: set[WorkerId] = set()
        self.commits = Commits()

    async def listen(self) -> None:
        """For ever. The clock excuses everybody for an absence of the driver."""
        self._absent = self._clock.absent
        while True:
            await asyncio.sleep(self._interval)
            now, cluster = self._clock.now(), self._cluster()
            self._tell_of_absence()
            self._hosts(cluster)
            self._workers(cluster)
            if cluster.phase == "running" and not self._is_a_host_quiet(cluster):
                news = self.commits.news(cluster.generation, max(1.0, self._silence / 2), now)
                if news is not None:
                    self._post(news)

    def _is_a_host_quiet(self, cluster: ClusterState) -> bool:
        """Its workers are not heard then: whether they make commits is not known. It is heard soon, or lost."""
        return any(self._fleet.quiet_for(host) > QUIET * self._interval for host in cluster.hosts)

    def _tell_of_absence(self) -> None:
        seconds, self._absent = self._clock.absent - self._absent, self._clock.absent
        if seconds > self._silence:
            why = "its process or its machine was stopped"
            self._record(cmd.Record("driver-away", f"the driver did not run for {seconds:.0f} s: {why}"))

    def _hosts(self, cluster: ClusterState) -> None:
        for host in cluster.hosts:
            quiet = self._fleet.quiet_for(host)
            if quiet > self._silence:
                self._fleet.lose_agent(host, f"nothing heard of it for {quiet:.0f} s", quiet)

    def _workers(self, cluster: ClusterState) -> None:
        """Their processes exist and are not stopped, or their agents would have said so."""
        self._silent &= cluster.workers.keys()
        for w in cluster.workers:
            quiet = self._fleet.quiet_for(w)
            # If its host is not heard either, that is the host's fault, and soon will be said so.
            if quiet > self._silence and self._fleet.quiet_for(w.host) < self._silence / 2:
                self._silent.add(w)
                idle, state = self._fleet.live.idle(w, self._clock.now()), self._fleet.live.blocked_text(w)
                self._post(ev.WorkerSilent(w, quiet, idle, state))
            elif w in self._silent and quiet <= self._silence:
                self._silent.discard(w)
                self._post(ev.WorkerResponded(w))
