"""Finds out whether the main thread hangs in an aborted collective, and asks the driver how such a worker ends.

`core/hangs.py` decides; `LinkThread._end_hung` ends the process.

A broken connection does not wake every rank. If a write fails, or a message is half read, gloo never reports it:
`Pair::signalException` passes over unbound buffers in its transmit queue, and over the one that it reads. An abort ends
connections so that this is rare (`sockets.Connections.end`). But a rank that was just writing to a rank that died may wait
until the group's timeout. Nothing wakes it, and DDP's reducer keeps its lock meanwhile, so no later backward pass of this
process could run: the worker is replaced. A rank that computes, sleeps or reads data is not replaced: its next
collective raises.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import FrameType

from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.worker.error_text import chain
from nbelastic.worker.threads import run_in_thread

HANG_TIMEOUT = 0.3  # seconds that an aborted main thread may sleep in a collective
GPU_HANG_TIMEOUT = 30.0  # the same if this process uses a GPU: seconds that one call may last
REPEAT = 2.0  # seconds after which an unanswered message is sent again
ASK_PERIOD = 0.25  # seconds after which a worker that hangs asks again
COLLECTIVES = ("/torch/distributed/",)
BLOCKING_FILES = (
    *COLLECTIVES,
    "/torch/nn/parallel/",
    "/torch/autograd/",
    "/nbelastic/worker/process_group.py",
    "/nbelastic/state/transfer.py",
)
# Their frames call operators. DTensor's collectives wait in one, `wait_tensor`.
CALLING_FILES = ("/torch/_ops.py", "/torch/_library/")
GPU_BLOCKING_FILES = (*BLOCKING_FILES, "/torch/cuda/", "/nbelastic/worker/")
Position = tuple[int, ...]


class MainThread:
    """Watches the main thread from another thread, from `now` on (monotonic seconds)."""

    def __init__(self, now: float, *, with_gpu: bool = False) -> None:
        main = threading.main_thread()
        self.timeout = GPU_HANG_TIMEOUT if with_gpu else HANG_TIMEOUT
        self._files = GPU_BLOCKING_FILES if with_gpu else BLOCKING_FILES
        self._position = self._position_with_gpu if with_gpu else self._position_asleep
        self._ident = main.ident or 0
        self._since = now
        self._at: Position | None = None

    def hangs_for(self, now: float) -> float:
        """Seconds for which it has been in one place inside a collective; 0 when it moves."""
        position = self._position() if self._is_in_collective() else None
        if position is None or position != self._at:
            self._since, self._at = now, position
        return now - self._since

    def hangs(self, now: float) -> bool:
        """Whether it has been in one place for too long."""
        return self.hangs_for(now) > self.timeout

    def _position_asleep(self) -> Position | None:
        """Its CPU time, while it sleeps."""
        state, used = read_stat(os.getpid())  # the main thread has the process's number
        return (used,) if state == "S" else None

    def _position_with_gpu(self) -> Position | None:
        """The call that it is in, and the CPU time of autograd's threads. It may spin there: CUDA waits like that."""
        frame = sys._current_frames().get(self._ident)
        return None if frame is None else (id(frame), frame.f_lasti, *_autograd_times())

    def _is_in_collective(self) -> bool:
        frame = sys._current_frames().get(self._ident)
        files: tuple[str, ...] = self._files
        while frame is not None and _is_in(frame, CALLING_FILES):
            frame, files = frame.f_back, COLLECTIVES
        return frame is not None and _is_in(frame, files)


def _is_in(frame: FrameType, files: Iterable[str]) -> bool:
    return any(part in frame.f_code.co_filename for part in files)


def _autograd_times() -> list[int]:
    """The CPU time of each thread of autograd in this process, in ticks."""
    found = []
    for task in sorted(os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # the thread has ended
            if Path(f"/proc/self/task/{task}/comm").read_text(errors="replace").startswith("pt_autograd"):
                found.append(read_stat(int(task))[1])
    return found


def read_stat(task: int) -> tuple[str, int]:
    """The state of a thread of this process, and the CPU time that it has used, in ticks."""
    try:
        fields = Path(f"/proc/self/task/{task}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # the thread has ended
        return "", -1
    return fields[0], int(fields[11]) + int(fields[12])


class HangResponse:
    """What a worker does when no abort wakes its main thread: it asks the driver how to end.

    The driver may answer that the worker has to keep its training state first. `enter` is for the main thread, the other
    methods are for the link thread.
    """

    def __init__(
        self,
        worker: WorkerId,
        send: Callable[[ev.Event], None],
        end: Callable[[], object],
        discard: Callable[[], object] = lambda: None,
    ) -> None:
        """`send` an event to the driver; `end` this process; `discard` the state that was kept."""
        self._worker, self._send, self._end, self._discard = worker, send, end, discard
        self._lock = threading.Lock()  # either a new generation is entered, or keeping the state begins
        self._entered = 0  # the newest generation in which the main thread may change the state
        self._main: MainThread | None = None
        self._generation = 0  # the aborted one
        self._sent: ev.Event | None = None  # the last event, and when to send it again
        self._send_at = 0.0
        self._job = ""
        self._keeping: Future[int] | None = None  # its result is the commit that was kept
        self._since = 0.0  # when keeping began
        self._may_enter = threading.Event()  # not set while the state is being kept
        self._may_enter.set()

    @property
    def is_keeping(self) -> bool:
        """Whether the state is being kept, or has been."""
        return self._keeping is not None

    def enter(self, generation: int) -> None:
        """The main thread is about to change the state, in a new generation: wait while the state is being kept."""
        with self._lock:
            self._entered = generation
        self._may_enter.wait()

    def reset(self) -> None:
        """The main thread is in no aborted generation."""
        self._main, self._sent = None, None

    def watch(self, generation: int, now: float, *, with_gpu: bool = False) -> bool:
        """Whether the main thread, which has to leave this aborted `generation`, hangs in it."""
        self._main, self._generation = self._main or MainThread(now, with_gpu=with_gpu), generation
        return self._main.hangs(now)

    def ask(self, commit: int, now: float) -> None:
        """Ask the driver how to end. It calls `answer`, maybe late: the answer depends on other workers."""
        self._repeat(ev.WorkerHung(self._worker, self._generation, commit), now, ASK_PERIOD)

    def answer(self, keep: Callable[[], int] | None, job: str, now: float) -> None:
        """End the process, or first call `keep()`, which returns the commit. Do neither if the main thread has moved."""
        if self._keeping is not None:
            if keep is None and self._keeping.done():
                self._end()
            return
        if self._main is None or not self._main.hangs(now):
            return
        if keep is None:
            self._end()
            return
        with self._lock:
            if self._entered <= self._generation:
                self._may_enter.clear()
                self._keeping, self._since, self._job = run_in_thread(keep), now, job

    def continue_keeping(self, now: float) -> None:
        """Report to the driver until it answers. If the main thread has moved, discard what was kept."""
        assert self._keeping is not None
        if self.has_moved(now):
            if self._keeping.done():
                self._keeping = None
                self._discard()
                self.reset()
                self._may_enter.set()
        elif not self._keeping.done():
            self._repeat(ev.WorkerHung(self._worker, self._generation, keeping=True), now, REPEAT)
        elif self._keeping.exception() is not None:
            self._end()
        else:
            self._repeat(ev.StateKept(self._worker, self._job, self._keeping.result()), now, ASK_PERIOD)

    def has_moved(self, now: float) -> bool:
        """Whether the main thread has moved since keeping began: the state may have changed since."""
        return self._main is None or self._main.hangs_for(now) < now - self._since

    def _repeat(self, event: ev.Event, now: float, period: float) -> None:
        if event != self._sent or now >= self._send_at:
            self._sent, self._send_at = event, now + period
            self._send(event)


def may_be_collective(error: BaseException | None) -> bool:
    """Whether a collective may have raised `error`: torch.distributed raises RuntimeErrors, which user code may wrap."""
    return any(isinstance(one, RuntimeError) for one in chain(error))
