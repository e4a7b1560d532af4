"""What an agent decides about its workers: messages, exits, process states and times go in, actions come out.

This module has no process, socket or clock: `agent` carries the actions out.
"""

# mypy: disable-error-code="misc"
# (subclasses of a frozen msgspec struct are frozen, too, which mypy does not know)
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from nbelastic.protocol import agent_messages, messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.chaos import STOPPED_FOR, FaultKind
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.timeouts import LAST_CHECKPOINT, OWNER_ENDED

KILL_AFTER = 1.0  # seconds between SIGTERM and SIGKILL
FROZEN_CHECKS = 2  # a process found stopped so many times in a row is reported
BLOCKED = 1.0  # seconds in uninterruptible sleep after which it is reported
FROZEN_STATES = {"T": "stopped", "t": "traced"}


class Action(Struct, frozen=True):
    """Base of what the agent's process must do."""


class Send(Action):
    """Send this message to the driver."""

    message: messages.Message | ev.Event


class SendHello(Action):
    """Send a hello, as the first message of a new session: messages that the last driver has not received are dropped."""


class Fork(Action):
    """Fork a worker, then call `forked` or `exited`."""

    order: agent_messages.Spawn


class Signal(Action):
    """Send SIGTERM to the worker's process group; `kill`: SIGKILL."""

    worker: WorkerId
    kill: bool


class Harm(Action):
    """Send SIGKILL, or with `stop` SIGSTOP, to the worker's process; without a worker, SIGKILL to the agent itself."""

    worker: WorkerId | None
    stop: bool = False


class End(Action):
    """End the agent, and its workers with it."""


class _Worker:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.frozen = 0  # consecutive checks that have found it stopped
        self.blocked_at = 0.0  # when its main thread began an uninterruptible sleep; 0.0: it is in none
        self.kill_at = 0.0  # from then on each check kills it; 0.0: it may run


class Protocol:
    """The decisions of one agent. Times are seconds of one clock."""

    def __init__(self, host: str, lease: float, notice: float) -> None:
        """`lease`: seconds without a driver after which the agent ends; its workers may write a last checkpoint first.

        `notice`: seconds between SIGTERM and its end.
        """
        self._host, self._lease, self._notice = host, lease, notice
        self._end: tuple[float, str] | None = None  # when the agent ends, and why; None: no end is known
        self._terminated = False  # SIGTERM came
        self._owner_ended_at: float | None = None
        self.cluster_ended = False  # its files were removed
        self._workers: dict[WorkerId, _Worker] = {}
        self._term = 0  # of the newest driver
        self.newest: dict[int, int] = {}  # the highest incarnation, by slot

    @property
    def workers(self) -> tuple[tuple[WorkerId, int], ...]:
        """The workers that run, with their pids."""
        return tuple((w, worker.pid) for w, worker in self._workers.items())

    def blocked(self, now: float) -> dict[str, float]:
        """For how many seconds workers' main threads have been in uninterruptible sleep."""
        since = {str(w): worker.blocked_at for w, worker in self._workers.items() if worker.blocked_at}
        return {w: now - at for w, at in since.items() if now - at >= BLOCKED}

    def handle(self, message: Any, now: float) -> list[Action]:
        """Handle a message of the driver."""
        match message:
            case agent_messages.Spawn(worker=w):
                self.newest[w.slot] = max(w.incarnation, self.newest.get(w.slot, 0))
                return [Fork(message)]
            case agent_messages.StopWorker(worker=w, kill=kill):
                worker = self._workers.get(w)
                if worker is None:
                    return [Send(ev.WorkerExited(w, 0))]
                worker.kill_at = now if kill else now + KILL_AFTER
                return [Signal(w, kill)]
            case agent_messages.InjectFault(kind=kind, worker=w):
                return self._harm(kind, w, now)
            case messages.NewDriver(term=term) if term >= self._term:
                self._term = term
                for worker in self._workers.values():
                    worker.frozen = 0  # so that the new driver receives it, too
                return [SendHello(), *self._announce_end(now)]
            case agent_messages.CancelEnd():
                self._end, self._terminated = None, False
            case agent_messages.StopAgent():
                return [End()]
        return []

    def _harm(self, kind: FaultKind, w: WorkerId | None, now: float) -> list[Action]:
        """Harm a worker that runs. One that is stopped never stays so: see `check_states`."""
        if w is None:
            return [Harm(None)]
        worker = self._workers.get(w)
        if worker is None or worker.kill_at:  # it has ended, or is about to
            return []
        if kind == "stop":
            worker.kill_at = now + STOPPED_FOR
        return [Harm(w, stop=kind == "stop")]

    def terminated(self, at: float, now: float) -> list[Action]:
        """SIGTERM came: the agent will end, but its workers may leave at a commit before. At the second one it ends at once."""
        if self._terminated:
            return [Send(agent_messages.AgentGoodbye(self._host, "its agent received SIGTERM twice")), End()]
        self._terminated = True
        return self.will_end(at + self._notice, "SIGTERM to its agent", now)

    def will_end(self, at: float, reason: str, now: float) -> list[Action]:
        """The host ends at this time. If an earlier end is known, that one stays."""
        self._end = min(self._end or (at, reason), (at, reason))
        return self._announce_end(now)

    def _announce_end(self, now: float) -> list[Action]:
        if self._end is None:
            return []
        at, reason = self._end
        return [Send(agent_messages.AgentEnding(self._host, max(0.0, at - now), reason))]

    def check_end(self, now: float) -> list[Action]:
        """End at the announced time if the driver has not ended the agent before."""
        if self._end is None or now < self._end[0]:
            return []
        return [Send(agent_messages.AgentGoodbye(self._host, f"its time is over: {self._end[1]}")), End()]

    def forked(self, w: WorkerId, pid: int) -> list[Action]:
        self._workers[w] = _Worker(pid)
        return [Send(ev.WorkerStarted(w, pid))]

    def exited(self, w: WorkerId, code: int, last_line: str = "") -> list[Action]:
        """The worker's process has ended: end its child processes."""
        known = self._workers.pop(w, None) is not None
        return [Send(ev.WorkerExited(w, code, last_line)), *([Signal(w, kill=True)] if known else [])]

    def check_states(self, states: Mapping[WorkerId, str], now: float) -> list[Action]:
        """Check the states of the workers' processes, letters as in /proc.

        A worker that must end is killed at each check: just after the fork it has no process group yet.
        """
        actions: list[Action] = []
        for w, worker in self._workers.items():
            state = states.get(w, "")
            worker.frozen = worker.frozen + 1 if state in FROZEN_STATES else 0
            worker.blocked_at = (worker.blocked_at or now) if state == "D" else 0.0
            if worker.frozen == FROZEN_CHECKS:
                actions.append(Send(ev.WorkerFrozen(w, FROZEN_STATES[state])))
            if worker.kill_at and now >= worker.kill_at:
                actions.append(Signal(w, kill=True))
        return actions

    def owner_ended(self, now: float) -> None:
        """The kernel that owns the cluster has ended: a driver that runs must end everything. Called at each check."""
        if self._owner_ended_at is None:
            self._owner_ended_at = now

    def must_end(self, heard_at: float, now: float) -> bool:
        """Whether the agent must end by itself: no driver will end it. `heard_at`: when a driver sent the last message.

        No driver knows an agent that has started while its driver was killed. When the cluster is stopped then, nothing else
        ends this agent. It has no workers.
        """
        if self.cluster_ended and not self._workers:
            return True
        if self._owner_ended_at is not None and now - max(heard_at, self._owner_ended_at) > OWNER_ENDED:
            return True
        return now - heard_at - self._lease > (LAST_CHECKPOINT if self._workers else 0.0)
