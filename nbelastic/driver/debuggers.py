"""The debuggers in which programs wait, and the clients that answer them."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future

from nbelastic.core.state import ClusterState
from nbelastic.driver.pending import Pending
from nbelastic.driver.workers import Workers
from nbelastic.errors import UsageError
from nbelastic.protocol import program_events as pev
from nbelastic.protocol import worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.requests import Debug, DebuggerPrompt


class Debuggers:
    """Lives in the driver's thread."""

    def __init__(self, workers: Workers, pending: Pending) -> None:
        self._workers, self._pending = workers, pending
        self._waiting: dict[WorkerId, pev.BreakpointReached] = {}
        self._answered: dict[WorkerId, int] = {}  # the newest input that was sent

    def note(self, event: pev.BreakpointReached | pev.BreakpointLeft) -> None:
        """A program waits in the debugger, or goes on."""
        w = event.worker
        if isinstance(event, pev.BreakpointLeft):
            self._waiting.pop(w, None)
        elif event.number > self._answered.get(w, 0):  # else it is a repetition from before the answer
            self._waiting[w] = event

    def forget(self, lost: Collection[WorkerId]) -> None:
        """These workers are lost, with the programs that waited in them."""
        for w in lost:
            self._waiting.pop(w, None)
            self._answered.pop(w, None)

    def answer(self, request: Debug, prompt: Future[DebuggerPrompt]) -> None:
        """Resolve `prompt` when a program waits for input: that of the request's rank, or any.

        With a line: send it, and resolve when the program waits again or goes on. UsageError if it does not wait any more.
        """
        if request.line is None:
            self._pending.resolve(prompt, lambda cluster: self._first(cluster, request.rank))
            return
        waits = next((one for one in self._waiting.values() if one.number == request.number), None)
        if waits is None:
            raise UsageError(
                "the program does not wait for this line any more: another client has answered, or it goes on."
            )
        w = waits.worker
        self._answered[w] = waits.number
        del self._waiting[w]
        self._workers.send((w,), worker_messages.DebuggerInput(waits.number, request.line))

        def next_prompt(cluster: ClusterState) -> DebuggerPrompt | None:
            if w in self._waiting:
                return self._prompt(cluster, self._waiting[w])
            goes_on = w not in cluster.workers or not cluster.workers[w].breakpoint_at
            return DebuggerPrompt(0, str(w)) if goes_on else None

        self._pending.resolve(prompt, next_prompt)

    def _first(self, cluster: ClusterState, rank: int | None) -> DebuggerPrompt | None:
        if cluster.active is None:
            raise UsageError("no job is running, so no program waits at a breakpoint.")
        prompts = [self._prompt(cluster, waits) for waits in self._waiting.values()]
        return next((one for one in prompts if rank is None or one.rank == rank), None)

    @staticmethod
    def _prompt(cluster: ClusterState, waits: pev.BreakpointReached) -> DebuggerPrompt:
        w = waits.worker
        rank = cluster.members.index(w) if w in cluster.member_set else None
        return DebuggerPrompt(waits.number, str(w), rank, waits.text)
