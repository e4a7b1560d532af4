"""Is the main thread stuck in a collective, or is it busy with the user's code? And how a worker ends that is stuck.

Aborting gloo does not wake everybody: a send that was partly written when its connection broke is never told
(`Pair::signalException` passes over unbound buffers in its transmit queue), so about one rank in a hundred waits on
until the group's time-out. Nothing wakes it, and DDP's reducer keeps its lock meanwhile, so that no later backward pass
of this process could run either: the worker is replaced. One that computes, sleeps or reads data is not: it will meet
the abort at its next collective.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.worker.next_generation import in_a_thread

PATIENCE = 0.3  # seconds that an aborted main thread may sleep in a collective
REPEAT = 2.0  # seconds after which an unanswered word is said again
ASK = 0.25  # seconds after which it is asked again how to end
WAITS = (
    "/torch/distributed/",
    "/torch/nn/parallel/",
    "/torch/autograd/",
    "/nbelastic/worker/process_group.py",
    "/nbelastic/state/transfer.py",
)


class Blocked:
    """Watches the main thread from another one, from `now` on (monotonic seconds)."""

    def __init__(self, now: float) -> None:
        main = threading.main_thread()
        self._ident = main.ident or 0
        self._stat = Path(f"/proc/self/task/{os.getpid()}/stat")  # the main thread has the process's number
        self._since = now
        self._used = -1

    def stuck_for(self, now: float) -> float:
        """Seconds for which it has slept inside a collective without a tick of CPU; starts again when it moves."""
        asleep, used = self._look()
        if not asleep or used != self._used or not self._in_a_collective():
            self._since, self._used = now, used
        return now - self._since

    def _look(self) -> tuple[bool, int]:
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            return False, -1
        return fields[0] == "S", int(fields[11]) + int(fields[12])

    def _in_a_collective(self) -> bool:
        frame = sys._current_frames().get(self._ident)
        return frame is not None and any(part in frame.f_code.co_filename for part in WAITS)


class Stuck:
    """What a worker does whose main thread no abort wakes: it asks the driver how to end.

    It may be told to keep the training state first. `say` sends a word to the driver; `end` ends this process. `enter` is
    for the main thread, the rest for the link's.
    """

    def __init__(
        self,
        worker: WorkerId,
        say: Callable[[ev.Event], None],
        end: Callable[[], object],
        discard: Callable[[], object] = lambda: None,
    ) -> None:
        """`discard` removes what was kept."""
        self._worker, self._say, self._end, self._discard = worker, say, end, discard
        self._lock = threading.Lock()  # a new generation is entered, or it is begun to keep the state: not both at once
        self._entered = 0  # the newest generation in which the main thread may change the state
        self._blocked: Blocked | None = None
        self._generation = 0  # the aborted one
        self._said: ev.Event | None = None  # last, and when it is said again
        self._say_at = 0.0
        self._job = ""
        self._keeping: Future[int] | None = None  # the state, and so its commit
        self._since = 0.0  # since when
        self._free = threading.Event()  # set while the state is not being kept: the main thread may enter a generation
        self._free.set()

    @property
    def keeping(self) -> bool:
        """Whether the state is being kept, or has been."""
        return self._keeping is not None

    def enter(self, generation: int) -> None:
        """The main thread is about to change the state, in a new generation. If that is being kept just now, it waits."""
        with self._lock:
            self._entered = generation
        self._free.wait()

    def forget(self) -> None:
        """No generation that is aborted holds the main thread."""
        self._blocked, self._said = None, None

    def watch(self, generation: int, now: float) -> bool:
        """Look at the main thread, which is to leave this aborted `generation`: whether it is stuck in it."""
        self._blocked, self._generation = self._blocked or Blocked(now), generation
        return self._blocked.stuck_for(now) > PATIENCE

    def ask(self, commit: int, now: float) -> None:
        """How to end. The answer comes to `answer`; there is none while that depends on what others say."""
        self._repeat(ev.WorkerHung(self._worker, self._generation, commit), now, ASK)

    def answer(self, keep: Callable[[], int] | None, job: str, now: float) -> None:
        """End; but first `keep()`, if it is given, which returns the commit. A main thread that has moved meanwhile goes on."""
        if self._keeping is not None:
            if keep is None and self._keeping.done():
                self._end()
            return
        if self._blocked is None or self._blocked.stuck_for(now) <= PATIENCE:
            return
        if keep is None:
            self._end()
            return
        with self._lock:
            if self._entered <= self._generation:
                self._free.clear()
                self._keeping, self._since, self._job = in_a_thread(keep), now, job

    def go_on_keeping(self, now: float) -> None:
        """The driver is told, until it answers. If the main thread has moved meanwhile, what was kept does not count."""
        assert self._keeping is not None
        if self.moved(now):
            if self._keeping.done():
                self._keeping = None
                self._discard()
                self.forget()
                self._free.set()
        elif not self._keeping.done():
            self._repeat(ev.WorkerHung(self._worker, self._generation, keeping=True), now, REPEAT)
        elif self._keeping.exception() is not None:
            self._end()
        else:
            self._repeat(ev.StateKept(self._worker, self._job, self._keeping.result()), now, ASK)

    def moved(self, now: float) -> bool:
        """Whether the main thread has, since the state is being kept: what it holds may be another one now."""
        return self._blocked is None or self._blocked.stuck_for(now) < now - self._since

    def _repeat(self, word: ev.Event, now: float, every: float) -> None:
        if word != self._said or now >= self._say_at:
            self._said, self._say_at = word, now + every
            self._say(word)


def of_a_collective(error: BaseException | None) -> bool:
    """Whether `error` could be one's: torch.distributed raises RuntimeErrors, which the user's code may have wrapped."""
    while error is not None:
        if isinstance(error, RuntimeError):
            return True
        error = error.__cause__ or error.__context__
    return False
