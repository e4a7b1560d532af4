"""The drivers of a simulation: one is killed, between two events or in the middle of its commands, and the next one takes over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nbelastic.core import takeover
from nbelastic.core.cluster_snapshot import SavedCluster, snapshot_of
from nbelastic.driver.takeover import CHECK_INTERVAL, TakeoverReports
from nbelastic.protocol import events as ev
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from tests.core.invariants import check

if TYPE_CHECKING:
    from tests.simulation.world import World


class Drivers:
    """`term`: the number of the newest driver. `decides`: it lives and has a cluster state. `reports`: it is taking over.

    `told_to_end`: workers that the driver before it had decided to end.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.term = 1
        self.decides = True
        self.died_at = 0.0  # the last one that was killed
        self.reports: TakeoverReports | None = None
        self.told_to_end: frozenset[WorkerId] = frozenset()
        self._saved: SavedCluster | None = None
        self._inbox: list[ev.Event] = []  # of a driver that is taking over
        self._orders: list[ev.Event] = []  # of users, who wait for a driver
        self._commands_left: int | None = None  # after which the driver dies
        self._away = 0.0  # seconds until the next driver begins then
        self._next: Any = None  # the timer of the next driver

    @property
    def is_dead(self) -> bool:
        return not self.decides and self.reports is None

    def order(self, event: ev.Event) -> None:
        """A user's order, for which there is no driver yet."""
        self._orders.append(event)

    def tell(self, event: ev.Event) -> None:
        """What a driver has received, or has found out."""
        if self.decides:
            self._world.post(event)
        elif self.reports is not None:
            self._inbox.append(event)

    def kill(self, seconds: float, commands: int | None = None) -> None:
        """Kill the driver, now or after so many commands of its next decision. The next one begins `seconds` later."""
        if self.is_dead:
            return
        if commands is not None and self.decides:
            self._commands_left, self._away = commands, seconds
            return
        if self.decides:
            self._saved = snapshot_of(self._world.cluster)  # it is saved before the commands are carried out
        self.decides, self.reports, self._commands_left, self.died_at = False, None, None, self._world.clock.now
        self._inbox.clear()
        self._world.lose_driver()
        self._next = self._world.clock.after(seconds, self._begin)

    def survives(self, commands: int) -> int:
        """How many of these commands the driver carries out before it dies; all, unless a fault kills it."""
        return commands if self._commands_left is None else min(commands, self._commands_left)

    def end_if_due(self, commands: int) -> None:
        """The driver has carried out a decision of so many commands."""
        if commands and self._commands_left is not None:
            self._commands_left = None
            self.kill(self._away)

    def begin_soon(self) -> None:
        """If there is no driver, the next one begins at once."""
        self._commands_left = None
        if self.is_dead:
            self._next.cancel()
            self._begin()

    def _begin(self) -> None:
        world, saved = self._world, self._saved
        assert saved is not None
        world.check_none_blocks()
        self.term += 1
        world.drop_ended_agents()
        agents = {host: SimpleNamespace(process="", job="", is_tunnelled=False) for host in world.agents}
        before: Any = SimpleNamespace(agents=agents, cluster=saved, job=None)
        self.reports = TakeoverReports(before, saved.limits.silence)
        for agent in world.agents.values():
            agent.heard_at = world.clock.now
            agent.introduce(messages.NewDriver(self.term))
        self._wait(self.reports, world.clock.now)

    def _wait(self, reports: TakeoverReports, begun: float) -> None:
        if reports is not self.reports:  # this driver was killed
            return
        now = self._world.clock.now
        if reports.is_complete(self._world.agents.__contains__) or now >= begun + reports.timeout:
            self._take_over(reports)
        else:
            self._world.clock.after(CHECK_INTERVAL, self._wait, reports, begun)

    def _take_over(self, reports: TakeoverReports) -> None:
        world, now = self._world, self._world.clock.now
        assert self._saved is not None
        cluster, commands = takeover.resume(
            self._saved, reports.agents, reports.workers, now, coming=tuple(reports.coming)
        )
        check(cluster, cluster, (), now)  # its commands are those of several steps
        self.reports, self.decides, self.told_to_end = None, True, frozenset(self._saved.stopped)
        world.go_on_with(cluster, commands, set(reports.agents))
        events = [ev.WorkerRegistered(w) for w, report in reports.workers.items() if report.is_ready]
        waiting = [
            *(event for event in events if event.worker in cluster.workers),
            *reports.later,
            *self._inbox,
            *self._orders,
        ]
        self._inbox, self._orders = [], []
        for event in waiting:
            world.post(event)

    def handle_late_report(self, report: worker_messages.WorkerReport) -> None:
        """As in `driver.received_messages`."""
        world, w = self._world, report.worker
        cluster = world.cluster
        if w not in cluster.workers:
            return
        if takeover.is_too_late(cluster, report):
            world.post(ev.WorkerFrozen(w, takeover.TOO_LATE))
        elif report.is_ready:
            world.post(ev.WorkerRegistered(w))
