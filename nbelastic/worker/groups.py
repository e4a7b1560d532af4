"""The process groups of one worker: the present generation's, the one that is being closed, and the next one's."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from nbelastic.worker import accelerator
from nbelastic.worker.accelerator import MOST_ABORTS, Accelerator, Communicators
from nbelastic.worker.formation import Formation
from nbelastic.worker.interrupts import WorldAborted
from nbelastic.worker.next_generation import NextGeneration
from nbelastic.worker.process_group import POLL, Group, Offer
from nbelastic.worker.sockets import Connections
from nbelastic.worker.threads import result_of, run_in_thread

T = TypeVar("T")

ABORT_TIMEOUT = 0.1  # seconds that an aborted group may go on connecting before its thread is abandoned
NCCL_ABORT_TIMEOUT = 2.0  # the same with NCCL: an abandoned thread keeps memory of the GPU
CLOSE_TIMEOUT = 10.0  # seconds that closing a group may take; then it is aborted as well


class Groups:
    """`open`, `form`, `close` and `run_abortable` are for the main thread, `overdue` is for the link thread."""

    def __init__(self, address: str, is_over: Callable[[int], bool]) -> None:
        """`address`: where this worker offers stores. `is_over(generation)`: whether that generation has ended here."""
        self.present: Group | None = None
        self.next = NextGeneration(address)
        self.accelerator: Accelerator | None = None  # of this job's groups, beside gloo
        self._earlier: list[Communicators] = []  # of the last generations; other ranks may need the last
        self._is_over = is_over
        self._closing: Group | None = None
        self._left: Connections | None = None  # of the last generation: other ranks may still write to them
        self._closing_since = 0.0

    def open(self, generation: int) -> None:
        """Take the group that was prepared for this generation, or a new one. From here on an abort reaches it."""
        self.present = self.next.take(generation) or Group(generation, self.accelerator, self._earlier)

    def form(self, formation: Formation, offer: Offer) -> None:
        """Collective. Raises what torch raises, or WorldAborted."""
        assert self.present is not None
        is_overdue = self._abort_timer(formation.generation)

        def check() -> None:
            if is_overdue():
                self.next.abandon_thread()
                raise WorldAborted

        self.present.form(formation, offer, self.next.run, check)

    def run_abortable(self, task: Callable[[], T]) -> T:
        """Run `task` in a thread of its own and return its result; raises what it raises.

        An abort does not always wake a transfer. Then this raises WorldAborted and abandons the thread. So `task` may write
        only to memory that is not used afterwards.
        """
        assert self.present is not None
        is_overdue = self._abort_timer(self.present.generation)

        def check() -> None:
            if is_overdue():
                raise WorldAborted

        return result_of(run_in_thread(task), check, POLL)

    def _abort_timer(self, generation: int) -> Callable[[], bool]:
        """A function that returns whether this generation was aborted too long ago."""
        since, timeout = 0.0, ABORT_TIMEOUT if self.accelerator is None else NCCL_ABORT_TIMEOUT

        def is_overdue() -> bool:
            nonlocal since
            if self._is_over(generation):
                since = since or time.monotonic()
            return since > 0 and time.monotonic() - since > timeout

        return is_overdue

    def close(self, *, abort: bool = False) -> None:
        """Close the present generation's group, if there is one; with `abort`, and if it is over, end its works."""
        self._closing, self.present = self.present, None
        if self._closing is not None:
            self._closing_since = time.monotonic()
            self.end_last()
            self._left = self._closing.connections
            left = self._closing.leave(others_may_wait=not (abort or self._is_over(self._closing.generation)))
            if left is not None:
                self._earlier = [*self._earlier[-MOST_ABORTS:], left]
            if self.uses_gpu:
                gc.collect()  # DDP is part of a cycle, and holds as much GPU memory as the gradients
        self._closing = None

    def end_last(self) -> None:
        """All ranks have left the last generation: end its connections and communicators, beside the training."""
        if self._left is not None:
            self._left.close()
            self._left = None
        if self._earlier:
            self._earlier[-1].abort()

    def abort_for_all(self) -> None:
        """Make the other ranks of the present generation raise or, between generations, those of the last one. In any thread."""
        group, left = self.present, self._left
        if group is not None:
            group.abort(for_all=True)
        elif left is not None:
            left.close()

    @property
    def uses_gpu(self) -> bool:
        """Whether this process has used a GPU, or its job's groups are for one."""
        return self.accelerator is not None or torch.cuda.is_initialized()

    def synchronize(self, *, all_streams: bool = False) -> None:
        """Wait for what this worker has begun on its GPU, if it uses one: in the present stream, or in all."""
        (self.accelerator or accelerator.NCCL).synchronize(all_streams=all_streams)

    def overdue(self, now: float) -> Group | None:
        """The group that the main thread has to leave: its generation is over, or closing it takes too long."""
        group = self.present
        if self._closing is not None and now - self._closing_since > CLOSE_TIMEOUT:
            return self._closing
        return group if group is not None and self._is_over(group.generation) else None

    def abort_next(self) -> bool:
        """Abort the next generation's group if that generation is over; returns whether there is nothing left to abort."""
        group = self.next.group
        return group is None or not self._is_over(group.generation) or self.next.abort()
