"""The driver's decisions: feeds events to the core one at a time, and has its commands carried out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from nbelastic.core import commands as cmd
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

# A worker reports them to the next driver as well: see `WorkerReport`. With many workers they come in thousands.
REPORTED_AGAIN = (
    ev.WorkerStarted,
    ev.WorkerReady,
    ev.StoreOffered,
    ev.WorkerPrepared,
    ev.WorkerFormed,
    ev.WorkerRaised,
)
SAVE_SOON = 0.1  # seconds within which they are saved if no command follows from them
Execute = Callable[[cmd.Command, float], None]
AfterDecision = Callable[[ev.Event, ClusterState, tuple[cmd.Command, ...], float], None]


class Decisions:
    """Owns the cluster state and the inbox. Lives in the driver's thread.

    - `is_stale(event)`: whether an event is dropped.
    - `save()`: saves the driver snapshot.
    - `execute(command, now)`: carries out a command.
    - `after_decision(event, before, commands, now)`: called after each decision, with the cluster state `before` it.
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
        after_decision: AfterDecision,
        on_failure: Callable[[ev.Event, Exception], None],
    ) -> None:
        self.cluster = ClusterState(limits)
        self._clock, self._event_log, self._internal_errors = clock, event_log, internal_errors
        self._is_stale, self._save, self._execute = is_stale, save, execute
        self._after_decision, self._on_failure = after_decision, on_failure
        self._inbox: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._can_decide_now = False
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._save_timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Note in the event log that the cluster's first driver begins."""
        self._event_log.note(Started(versions.nbelastic_version(), self.cluster.limits), self._clock.now())

    def post(self, event: ev.Event) -> None:
        """Put an event into the inbox."""
        self._inbox.put_nowait(event)

    def decide_now(self, event: ev.Event) -> None:
        """Decide on a node's event before those in the inbox, because its sender is the host's present node only now."""
        if not self._can_decide_now:  # there is no cluster state yet, or the first events come first
            self.post(event)
        else:
            self._decide(event)

    async def run(self) -> None:
        """Decide on all events until the cluster has stopped."""
        while not self._inbox.empty():
            self._decide(self._inbox.get_nowait())
        self._can_decide_now = True
        while self.cluster.phase != "finished":
            self._decide(await self._inbox.get())

    def set_deadline_timer(self, now: float) -> None:
        """Post a tick at the core's next deadline."""
        self.cancel_deadline_timer()
        at = deadline(self.cluster, now)
        if at != float("inf"):
            loop = asyncio.get_running_loop()
            self._deadline_timer = loop.call_later(at - now, self._inbox.put_nowait, ev.Ticked())

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

    def _decide(self, event: ev.Event) -> None:
        if self._internal_errors.decision_failure:
            self._stop_if_requested(event)
            return
        try:
            self._step(event)
        except Exception as error:  # noqa: BLE001  (a bug of ours: the training must go on)
            self._on_failure(event, error)

    def _stop_if_requested(self, event: ev.Event) -> None:
        """After a failed decision: a request to stop the cluster ends the driver, which then ends all that it has started."""
        if isinstance(event, ev.StopRequested):
            self.cluster = ClusterState(self.cluster.limits, stopping=event.reason)

    def _step(self, event: ev.Event) -> None:
        if self._is_stale(event):
            return
        now = self._clock.now()
        before = self.cluster
        if before.has_world:
            self._event_log.note_symptom(event, now)
        try:
            self.cluster, commands = step(before, event, now)
        except Exception:
            self._event_log.note(event, now)  # for a replay
            raise
        if isinstance(event, sev.NodeReady) and is_same(before, self.cluster):
            # A waiting node sends this event twice a second: it is neither logged nor published.
            for command in commands:
                self._execute(command, now)
            return
        error = call_each(
            [
                # First: if the driver is killed now, it has announced nothing that the next driver cannot know.
                self._save if commands or not isinstance(event, REPORTED_AGAIN) else self._save_soon,
                partial(self._event_log.note, event, now),
                *(partial(self._execute, command, now) for command in commands),
                *([self._save] if commands else []),  # the processes that were started
            ]
        )
        if not self.cluster.suspects:
            self._event_log.clear_symptoms()
        self._after_decision(event, before, commands, now)
        if error is not None:
            raise error
