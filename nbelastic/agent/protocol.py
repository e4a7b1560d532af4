"""What an agent does for its workers: orders, ends, states and the time go in, actions come out.

There is no process, socket or clock in here: `agent` carries the actions out.
"""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from nbelastic.protocol import agent_messages, messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId

GRACE = 1.0  # seconds between SIGTERM and SIGKILL
FROZEN_LOOKS = 2  # a process found stopped this many times in a row is reported
BLOCKED = 1.0  # seconds in uninterruptible sleep after which that is reported
ORPHANED = 3.0  # seconds that a driver may be silent which has to end everything
LAST = 60.0  # seconds that workers have for a last checkpoint when the lease is over
STATES = {"T": "stopped", "t": "traced"}


class Action(Struct, frozen=True):
    """Something to be done by the agent's process."""


class Say(Action):
    message: messages.Message | ev.Event


class Introduce(Action):
    """Tell a new driver all that it needs to know, and nothing that the last one has missed."""


class Fork(Action):
    """Its outcome is `forked` or `exited`."""

    order: agent_messages.Spawn


class Signal(Action):
    """To the worker's process group: SIGKILL or SIGTERM."""

    worker: WorkerId
    kill: bool


class End(Action):
    """The agent ends, and its workers with it."""


class _Worker:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.frozen = 0  # looks in a row
        self.blocked_at = 0.0  # since when its main thread is in uninterruptible sleep; 0.0: it is not
        self.kill_at = 0.0  # from when on it is killed at each look, until it is gone; 0.0: it may live


class Protocol:
    """Of one agent. Times are of one clock, in seconds."""

    def __init__(self, lease: float) -> None:
        """`lease`: seconds without a driver after which the agent ends; its workers may write a last checkpoint before."""
        self._lease = lease
        self._orphaned_at: float | None = None
        self.over = False  # the cluster has ended: its files are gone
        self._workers: dict[WorkerId, _Worker] = {}
        self._term = 0  # of the newest driver
        self.newest: dict[int, int] = {}  # the highest incarnation of each slot

    @property
    def workers(self) -> tuple[tuple[WorkerId, int], ...]:
        """Those that live, and their pids."""
        return tuple((w, worker.pid) for w, worker in self._workers.items())

    def blocked(self, now: float) -> dict[str, float]:
        """Workers whose main thread is in uninterruptible sleep, and for how many seconds."""
        since = {str(w): worker.blocked_at for w, worker in self._workers.items() if worker.blocked_at}
        return {w: now - at for w, at in since.items() if now - at >= BLOCKED}

    def heard(self, message: Any, now: float) -> list[Action]:
        """The driver orders something."""
        match message:
            case agent_messages.Spawn(worker=w):
                self.newest[w.slot] = max(w.incarnation, self.newest.get(w.slot, 0))
                return [Fork(message)]
            case agent_messages.StopWorker(worker=w, kill=kill):
                worker = self._workers.get(w)
                if worker is None:
                    return [Say(ev.WorkerExited(w, 0))]
                worker.kill_at = now if kill else now + GRACE
                return [Signal(w, kill)]
            case messages.Welcome(term=term) if term >= self._term:
                self._term = term
                for worker in self._workers.values():
                    worker.frozen = 0  # is said again
                return [Introduce()]
            case agent_messages.StopAgent():
                return [End()]
        return []

    def forked(self, w: WorkerId, pid: int) -> list[Action]:
        self._workers[w] = _Worker(pid)
        return [Say(ev.WorkerStarted(w, pid))]

    def exited(self, w: WorkerId, code: int) -> list[Action]:
        """Its process has ended; what it had started is ended with it."""
        known = self._workers.pop(w, None) is not None
        return [Say(ev.WorkerExited(w, code)), *([Signal(w, kill=True)] if known else [])]

    def looked(self, states: Mapping[WorkerId, str], now: float) -> list[Action]:
        """The states of the workers' processes, as in /proc. One that was just forked leads no group yet: it is killed again."""
        actions: list[Action] = []
        for w, worker in self._workers.items():
            state = states.get(w, "")
            worker.frozen = worker.frozen + 1 if state in STATES else 0
            worker.blocked_at = (worker.blocked_at or now) if state == "D" else 0.0
            if worker.frozen == FROZEN_LOOKS:
                actions.append(Say(ev.WorkerFrozen(w, STATES[state])))
            if worker.kill_at and now >= worker.kill_at:
                actions.append(Signal(w, kill=True))
        return actions

    def orphaned(self, now: float) -> None:
        """The kernel that owns the cluster has ended, as is seen at each look: the driver, if there is one, ends everything."""
        if self._orphaned_at is None:
            self._orphaned_at = now

    def forsaken(self, heard_at: float, now: float) -> bool:
        """No driver comes any more, and workers that end by themselves then have ended.

        Nobody stops an agent that came up when the driver that had started it was killed and the cluster stopped: no driver
        knows it. It has no workers.
        """
        if self.over and not self._workers:
            return True
        if self._orphaned_at is not None and now - max(heard_at, self._orphaned_at) > ORPHANED:
            return True
        return now - heard_at - self._lease > (LAST if self._workers else 0.0)
