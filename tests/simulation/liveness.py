"""What `driver.liveness` does every heartbeat of a simulation: it finds silent hosts, and a world that makes no commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.core.liveness import is_host_lost
from nbelastic.driver.liveness import SILENT_HEARTBEATS, StallDetector
from nbelastic.protocol import events as ev
from tests.simulation.network import DRIVER, HEARTBEAT
from tests.simulation.worker import LEASE

if TYPE_CHECKING:
    from tests.simulation.world import World


class Liveness:
    """Of one driver."""

    def __init__(self, world: World) -> None:
        self._world, self.stalls = world, StallDetector()
        self._cut_off_at: float | None = None  # when no host sent anything

    def watch(self) -> None:
        world, now = self._world, self._world.clock.now
        cluster, silences = world.cluster, {host: self._silence_of(host) for host in world.cluster.hosts}
        longest = max(silences.values(), default=0.0)
        if longest:
            self._find_lost_hosts(silences)
        if cluster.stands_still:
            self.stalls.excuse(now)
        elif world.cluster.phase == "running" and longest <= SILENT_HEARTBEATS * HEARTBEAT:
            event = self.stalls.check(world.cluster.generation, max(1.0, cluster.limits.silence / 2), now)
            if event is not None:
                world.post(event)

    def _find_lost_hosts(self, silences: dict[str, float]) -> None:
        world, now, cluster = self._world, self._world.clock.now, self._world.cluster
        most = cluster.limits.silence
        if min(silences.values()) > most:
            self._cut_off_at = now
        training = {w.host for w in cluster.members} if cluster.phase == "running" else set()
        since_commit = self.stalls.since_commit(cluster.generation, now)
        since_cut_off = now - self._cut_off_at if self._cut_off_at is not None else None
        for host, silence in silences.items():
            commit = since_commit if host in training else None
            if is_host_lost(silence, commit, since_cut_off, most=most, lease=LEASE):
                world.forget_agent(host)
                world.post(ev.AgentLost(host, f"no message from it for {silence:.0f} s", silence))

    def _silence_of(self, host: str) -> float:
        """Seconds since the last message of the host's present agent, which sends one all the time."""
        world, agent = self._world, self._world.agents.get(host)
        if agent is None or agent.heard_at is None:
            return 0.0
        if agent.is_alive and (host, DRIVER) not in world.network.cut:
            agent.heard_at = world.clock.now
        return world.clock.now - agent.heard_at
