"""Detects silent hosts and workers, and a running world without commits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from nbelastic.core import commands as cmd
from nbelastic.core.liveness import is_cut_off, is_host_lost
from nbelastic.core.state import ClusterState, HostPhase
from nbelastic.driver.agents import Agents
from nbelastic.driver.clock import Clock
from nbelastic.driver.telemetry import Telemetry
from nbelastic.driver.workers import Workers
from nbelastic.protocol import events as ev
from nbelastic.protocol.connection_events import HostReconnected
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.settings import Settings
from nbelastic.transport.backlog import read_turn

MAX_CHECK_DELAY = 2.0  # seconds that a check may be late; after a longer delay, the driver itself did not run
STALL_INTERVAL = 1.0  # seconds between events about the same stall
SILENT_HEARTBEATS = 3.0  # a host without messages for so many heartbeats may have workers that make commits
USUAL_COMMITS = 5.0  # times the generation's usual time between commits: a shorter time is not a stall


class StallDetector:
    """Measures the time since the running world's last commit. All times are those of `Clock.awake()`."""

    def __init__(self) -> None:
        self._newest = (0, -1)  # generation and commits
        self._newest_at = 0.0
        self._first = (0, 0.0)  # the generation's commits in the first report, and the time
        self._posted_at = 0.0  # time of the last event about the present stall; 0: there is no stall

    def note_commits(self, generation: int, count: int, now: float) -> None:
        """A worker has made so many commits in this generation."""
        if (generation, count) <= self._newest:
            return
        if generation != self._newest[0]:
            self._first = (count, now)
        self._newest, self._newest_at = (generation, count), now

    def excuse(self, now: float) -> None:
        """No commit is expected at the moment: the members stand still as planned. This time is not one between commits."""
        count, begun = self._first
        self._first = (count, begun + now - self._newest_at)
        self._newest_at, self._posted_at = now, 0.0

    def _usual_interval(self) -> float:
        """Seconds between commits in this generation; 0 if that is not known yet."""
        made = self._newest[1] - self._first[0]
        return (self._newest_at - self._first[1]) / made if made > 0 else 0.0

    def since_commit(self, generation: int, now: float) -> float | None:
        """Seconds since the last commit of this generation; None if none is known."""
        return now - self._newest_at if self._newest[0] == generation and self._newest[1] >= 0 else None

    def check(self, generation: int, patience: float, now: float) -> ev.StallDetected | ev.StallResolved | None:
        """The event to post for the world of `generation`, which runs; None if there is nothing new."""
        if generation != self._newest[0]:
            self._newest, self._newest_at, self._posted_at, self._first = (generation, -1), now, 0.0, (0, now)
        if now - self._newest_at <= max(patience, USUAL_COMMITS * self._usual_interval()):
            was_stalled, self._posted_at = self._posted_at, 0.0
            return ev.StallResolved(generation) if was_stalled else None
        if now - self._posted_at < STALL_INTERVAL:
            return None
        self._posted_at = now
        return ev.StallDetected(generation, now - self._newest_at)


class Liveness:
    """Lives in the driver's thread. `post(event)` puts an event into the driver's inbox, `record` adds to the event log."""

    def __init__(
        self,
        settings: Settings,
        agents: Agents,
        workers: Workers,
        *,
        telemetry: Telemetry,
        clock: Clock,
        cluster: Callable[[], ClusterState],
        post: Callable[[ev.Event], None],
        record: Callable[[cmd.Record], None],
    ) -> None:
        self._max_silence, self._interval = settings.silence, settings.heartbeat
        self._agents, self._workers, self._telemetry, self._clock = agents, workers, telemetry, clock
        self._cluster, self._post, self._record = cluster, post, record
        self._lease = settings.lease
        self._is_cut_off = False  # the event log says that nothing is received from any host
        self._cut_off_at: float | None = None  # when that was so last
        self._absent = 0.0  # seconds of absences of the driver so far
        self._is_late = False  # the event log says that messages wait unread
        self._unresponsive: set[WorkerId] = set()
        self.stall_detector = StallDetector()

    async def watch(self) -> None:
        """Check every heartbeat, until cancelled. The clock does not count the driver's absences as silence."""
        self._absent = self._clock.absent
        while True:
            await asyncio.sleep(self._interval)
            await read_turn()
            now, cluster = self._clock.awake(), self._cluster()
            self._record_absence()
            self._note_backlog(cluster)
            silences = self._check_hosts(cluster, now)
            self._check_workers(cluster)
            if cluster.stands_still:
                self.stall_detector.excuse(now)
            elif cluster.phase == "running" and not self._is_a_host_silent(cluster, silences):
                event = self.stall_detector.check(cluster.generation, max(1.0, self._max_silence / 2), now)
                if event is not None:
                    self._post(event)

    def _is_a_host_silent(self, cluster: ClusterState, silences: Mapping[str, float]) -> bool:
        """If so, the driver cannot know whether its workers make commits. The host soon sends messages again, or is declared lost.

        Nor does the driver know it while it has not read what they send.
        """
        most = SILENT_HEARTBEATS * self._interval
        is_unknown = bool(cluster.disconnected) or self._agents.unread_seconds() > most
        return is_unknown or any(silence > most for silence in silences.values())

    def _record_absence(self) -> None:
        seconds, self._absent = self._clock.absent - self._absent, self._clock.absent
        if seconds > self._max_silence:
            why = "its process or its machine was stopped"
            self._record(cmd.Record("driver-away", f"the driver did not run for {seconds:.0f} s: {why}"))

    def _note_backlog(self, cluster: ClusterState) -> None:
        """Let deadlines wait for messages that are unread, but not the end of a host, which is announced for a time of day.

        Nor does the end of the cluster: a client waits no longer than the time that the user gave, and kills the driver then.
        """
        seconds = self._agents.unread_seconds()
        is_promised = cluster.ending or cluster.ending_nodes or cluster.stopping
        self._clock.hold(hold=seconds > self._interval and not is_promised)
        # A busy driver may never see that nothing is unread: it is late no longer once it reads within a heartbeat.
        was_late, self._is_late = self._is_late, seconds > (self._interval if self._is_late else self._max_silence)
        if self._is_late and not was_late:
            why = "the driver's machine may be overloaded; hosts train on"
            self._record(cmd.Record("driver-late", f"messages have waited unread for {seconds:.0f} s: {why}"))

    def _check_hosts(self, cluster: ClusterState, now: float) -> Mapping[str, float]:
        """Find lost hosts. Returns the seconds since the last message of each."""
        for host in cluster.disconnected:
            if self._agents.has_reconnected(host):
                self._post(HostReconnected(host))
        silences = {host: self._agents.silence_of(host) for host in cluster.hosts}
        up = [name for name, host in cluster.hosts.items() if host.phase in (HostPhase.UP, HostPhase.DRAINING)]
        self._check_own_network({host: silences[host] for host in up}, now)
        training = {w.host for w in cluster.members} if cluster.phase == "running" else set()
        since_commit = self.stall_detector.since_commit(cluster.generation, now)
        since_cut_off = now - self._cut_off_at if self._cut_off_at is not None else None
        for host, silence in silences.items():
            commit = since_commit if host in training else None
            if is_host_lost(silence, commit, since_cut_off, most=self._max_silence, lease=self._lease):
                self._agents.lose(host, f"no message from it for {silence:.0f} s", silence)
        return silences

    def _check_own_network(self, silences: Mapping[str, float], now: float) -> None:
        """Note whether no host sends anything. Hosts of this machine need no network.

        The last messages of hosts may lie a heartbeat apart, and so may two of these checks.
        """
        is_any_local = any(self._agents.has_local_agent(host) for host in silences)
        quiet = self._max_silence - 2 * self._interval
        if is_any_local or not is_cut_off(silences.values(), quiet=quiet):
            self._is_cut_off = False
        else:
            self._cut_off_at = now
            if not self._is_cut_off and min(silences.values()) > self._max_silence:
                self._is_cut_off = True
                why = "the network of its machine may be down; hosts train on"
                self._record(cmd.Record("driver-cut-off", f"the driver receives nothing from any host: {why}"))

    def _check_workers(self, cluster: ClusterState) -> None:
        """Find unresponsive workers. Their processes exist and are not stopped, or their agents would have reported that."""
        if not self._unresponsive and self._workers.are_heard(self._max_silence):
            return
        self._unresponsive &= cluster.workers.keys()
        for w in cluster.workers:
            silence = self._workers.silence_of(w)
            # If its host is silent too, the host is the cause, and is declared lost soon.
            if silence > self._max_silence and self._agents.silence_of(w.host) < self._max_silence / 2:
                self._unresponsive.add(w)
                idle, state = self._telemetry.is_idle(w, self._clock.now()), self._telemetry.blocked_text(w)
                self._post(ev.WorkerSilent(w, silence, idle, state))
            elif w in self._unresponsive and silence <= self._max_silence:
                self._unresponsive.discard(w)
                self._post(ev.WorkerResponded(w))
