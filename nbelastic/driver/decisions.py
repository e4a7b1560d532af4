"""The driver's decisions: feeds events to the core one at a time, and has its commands carried out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from nbelastic.core import commands as cmd
from nbelastic.core import together
from nbelastic.core.cluster_snapshot import is_saved
from nbelastic.core.replay import Started
from nbelastic.core.state import ClusterState, is_same
from nbelastic.core.step import deadline, step
from nbelastic.driver.clock import Clock
from nbelastic.driver.event_log import EventLog
from nbelastic.driver.internal_errors import InternalErrors, call_each
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.system import versions

# A worker reports them to the next driver as well (see `WorkerReport`), or they are of no use to it.
SAVED_LATER = {
    ev.WorkerStarted,
    ev.WorkerReady,
    ev.StoreOffered,
    ev.WorkerPrepared,
    ev.WorkerFormed,
    ev.WorkerRaised,
    ev.LeaveAcknowledged,
    ev.WorkerHalted,
}
HELD_TICK = 0.25  # seconds between two looks at a clock that stands still
SAVE_SOON = 0.1  # seconds within which what they change is saved, if no command follows from them
# With many workers these come in thousands. The driver saves once for all that wait in the inbox one after the other.
IN_BATCHES = {
    *SAVED_LATER,
    ev.AgentReady,
    ev.Probed,
    ev.WorkerRegistered,
    ev.SetupEnded,
    ev.WorkerSucceeded,
    ev.ProgramEnded,
    ev.WorkerSilent,
    ev.WorkerResponded,
}
# So many workers may end together, as when a library crashes in all. While a world trains, its abort waits for no other decision.
IN_BATCHES_WITHOUT_WORLD = {*IN_BATCHES, ev.WorkerExited}
BATCH = 256  # events at most, so that messages and other events do not wait for long
MAX_TURN = 0.1  # seconds of decisions; then the driver reads messages and sends heartbeats
Execute = Callable[[cmd.Command, float], None]


class Decision(NamedTuple):
    """The commands that these events at `now` led to, the last of them, and the cluster state `before` the first."""

    events: Sequence[ev.Event]
    before: ClusterState
    commands: tuple[cmd.Command, ...]
    now: float


AfterDecisions = Callable[[Sequence[Decision]], None]


class Decisions:
    """Owns the cluster state and the inbox. Lives in the driver's thread.

    - `is_stale(event)`: whether an event is dropped.
    - `save()`: saves the driver snapshot.
    - `execute(command, now)`: carries out a command.
    - `after_decisions(decided)`: called when decisions have been carried out: one, or those on events that waited together.
    - `on_failure(event, error)`: called when a decision has failed with an unexpected error.
    """

    def __init__(
        self,
        limits: Limits,
        clock: Clock,
        event_log: EventLog,
        internal_errors: InternalErrors,
        *,
        is_stale: Callable[[ev.Event], bool],
        save: Callable[[], None],
        execute: Execute,
        after_decisions: AfterDecisions,
        on_failure: Callable[[ev.Event, Exception], None],
    ) -> None:
        self.cluster = ClusterState(limits)
        self._clock, self._event_log, self._internal_errors = clock, event_log, internal_errors
        self._is_stale, self._save, self._execute = is_stale, save, execute
        self._after_decisions, self._on_failure = after_decisions, on_failure
        self._inbox: deque[ev.Event] = deque()
        self._has_arrived = asyncio.Event()
        self._can_decide_now = False
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._save_timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Note in the event log that the cluster's first driver begins."""
        self._event_log.note(Started(versions.nbelastic_version(), self.cluster.limits), self._clock.now())

    def post(self, event: ev.Event) -> None:
        """Put an event into the inbox."""
        self._inbox.append(event)
        self._has_arrived.set()

    def decide_now(self, event: ev.Event) -> None:
        """Decide on a node's event before those in the inbox, because its sender is the host's present node only now."""
        if not self._can_decide_now:  # there is no cluster state yet, or the first events come first
            self.post(event)
        else:
            self._decide([event])

    async def run(self) -> None:
        """Decide on all events until the cluster has stopped."""
        while self._inbox:
            self._decide_waiting()
        self._can_decide_now, loop = True, asyncio.get_running_loop()
        while self.cluster.phase != "finished":
            while not self._inbox:
                self._has_arrived.clear()
                await self._has_arrived.wait()
            turn_ends = loop.time() + MAX_TURN
            while self._inbox and loop.time() < turn_ends and self.cluster.phase != "finished":
                self._decide_waiting()
            await asyncio.sleep(0)

    def _decide_waiting(self) -> None:
        """Decide on the first event in the inbox, and on those behind it if all are of the kinds that come in thousands.

        Of other events each is decided on alone: whether it is stale may depend on the commands before it.
        """
        events, inbox = [self._inbox.popleft()], self._inbox
        kinds = IN_BATCHES if self.cluster.has_world else IN_BATCHES_WITHOUT_WORLD
        if type(events[0]) in kinds:
            while inbox and type(inbox[0]) in kinds and len(events) < BATCH:
                events.append(inbox.popleft())
        self._decide(events)

    def set_deadline_timer(self, now: float) -> None:
        """Post a tick at the core's next deadline."""
        self.cancel_deadline_timer()
        at = deadline(self.cluster, now)
        if at != float("inf"):
            loop = asyncio.get_running_loop()
            self._deadline_timer = loop.call_later(at - now, self._tick, at)

    def _tick(self, at: float) -> None:
        """The deadline has elapsed, unless the clock has stood still meanwhile, as it may still do."""
        if self._clock.is_held and self._clock.now() < at:
            self._deadline_timer = asyncio.get_running_loop().call_later(HELD_TICK, self._tick, at)
        else:
            self.post(ev.Ticked())

    def cancel_deadline_timer(self) -> None:
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None

    def close(self) -> None:
        """Call nothing any more."""
        self.cancel_deadline_timer()
        if self._save_timer is not None:
            self._save_timer.cancel()
            self._save_timer = None

    def _save_soon(self) -> None:
        """Save once for many events: with more workers there are more of them, and saving takes longer."""
        if self._save_timer is None:
            self._save_timer = asyncio.get_running_loop().call_later(SAVE_SOON, self._save_late)

    def _save_late(self) -> None:
        self._save_timer = None
        self._save()

    def _decide(self, events: Sequence[ev.Event]) -> None:
        """Decide on these events, then carry out all decisions."""
        decided: list[Decision] = []
        now = self._clock.now()
        number = 0
        while number < len(events):
            event = events[number]
            try:
                decision = self._decide_first(events[number:], now)
                decided += [decision] if decision is not None else []
                number += len(decision.events) if decision is not None else 1
            except Exception as error:  # noqa: BLE001  (a bug of ours: the training must go on)
                self._carry_out(decided)
                decided.clear()
                self._event_log.note(event, now)  # for a replay
                self._on_failure(event, error)
                number += 1
        self._carry_out(decided)

    def _decide_first(self, events: Sequence[ev.Event], now: float) -> Decision | None:
        """Decide on the first of these events, or on several if the core can. None: there is nothing to carry out or to log."""
        event, before, last = events[0], self.cluster, len(events) - 1
        if self._internal_errors.decision_failure:
            self._stop_if_requested(event)
            return None
        if last:
            self.cluster, count = together.decide(before, events[:last], now)
            if count:
                return Decision(events[:count], before, (), now)
        return self._step(event, now, more=last > 0)

    def _stop_if_requested(self, event: ev.Event) -> None:
        """After a failed decision: a request to stop the cluster ends the driver, which then ends all that it has started."""
        if isinstance(event, ev.StopRequested):
            self.cluster = ClusterState(self.cluster.limits, stopping=event.reason)

    def _step(self, event: ev.Event, now: float, *, more: bool) -> Decision | None:
        """Decide on one event."""
        if self._is_stale(event):
            return None
        before = self.cluster
        if before.has_world:
            self._event_log.note_symptom(event, now)
        self.cluster, commands = step(before, event, now, more=more)
        if isinstance(event, sev.NodeReady) and is_same(before, self.cluster):
            # A waiting node sends this event twice a second: it is neither logged nor published.
            for command in commands:
                self._execute(command, now)
            return None
        return Decision([event], before, commands, now)

    def _carry_out(self, decided: Sequence[Decision]) -> None:
        """Save, log the events, execute the commands, and publish the state."""
        if not decided:
            return
        has_commands = any(decision.commands for decision in decided)
        calls: list[Callable[[], object]] = []
        if has_commands or not {type(event) for decision in decided for event in decision.events} <= SAVED_LATER:
            calls.append(self._save)  # first: what a driver announces, the next one must know if this one is killed now
        elif not is_saved(decided[0].before, self.cluster):
            calls.append(self._save_soon)
        events: list[ev.Event] = []
        for made, _, commands, now in decided:
            events += made
            if commands:
                calls.append(partial(self._event_log.note_all, events, now))
                calls += (partial(self._execute, command, now) for command in commands)
                events = []
        calls.append(partial(self._event_log.note_all, events, decided[-1].now))
        error = call_each([*calls, *([self._save] if has_commands else [])])  # at last the processes that were started
        if not self.cluster.suspects:
            self._event_log.clear_symptoms()
        self._after_decisions(decided)
        if error is not None:
            self._on_failure(decided[-1].events[-1], error)
