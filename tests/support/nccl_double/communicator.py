"""The inside of one of NCCL's groups: an `ncclComm_t`, the stream of its works, and torch's watchdog."""

from __future__ import annotations

import itertools
import os
import queue
import random
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from tests.support.nccl_double.mesh import Aborted, Mesh, PeerLost

WATCHDOG_PERIOD = 0.1  # seconds
ABORT_TIME = float(os.environ.get("NCCL_DOUBLE_ABORT_TIME", "0.05"))  # seconds that an abort takes
NOISE = 4096  # bytes of garbage, repeated
DIE, CLEAN_UP = (1, 3), (2,)  # values of TORCH_NCCL_ASYNC_ERROR_HANDLING: end the process, or only abort

Task = Callable[[Mesh], Sequence[torch.Tensor]]  # returns the values of a work's outputs

_numbers = itertools.count()
live: set[Communicator] = set()  # those that hold memory of the GPU: neither aborted nor shut down


class Work(dist.Work):
    """An operation that runs later, in the thread of its communicator's stream."""

    def __init__(self, task: Task, outputs: Sequence[torch.Tensor], timeout: timedelta) -> None:
        super().__init__()
        self.task, self.outputs, self.most = task, list(outputs), timeout.total_seconds()
        self.begun_at = monotonic()  # the watchdog counts from here, also while the work waits in the stream
        self._ended = threading.Event()
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def end(self) -> None:
        self._ended.set()
        self._future.set_result(self.outputs)

    def wait(self, _timeout: Any = None) -> bool:
        """Returns also after an abort, as if the work had succeeded."""
        return self._ended.wait()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set()

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self.outputs


class Communicator:
    """`abort` and `error` are for any thread."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, *, blocking: bool) -> None:
        self.begun = 0  # works
        self.error = ""  # what the watchdog has seen
        self._store, self._timeout = store, timeout
        self._mesh = Mesh(rank, size, blocking=blocking)
        self._can_abort = not blocking  # torch knows a communicator only when it is connected, if that blocks
        self._is_connected = False
        self._mutex = threading.Lock()  # for new works, and for the watchdog
        self._aborting, self._adding = threading.Lock(), threading.Lock()
        self._waiting = threading.Lock()  # held while this waits for its peers to connect
        self._timeout_of_connect = float(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800"))
        self._aborted, self._freed = threading.Event(), threading.Event()
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._running: Work | None = None
        self._last: Work | None = None
        self._lost = ""  # the peer that the running work lacks
        self._chance = random.Random(f"{os.environ.get('NCCL_DOUBLE_SEED', '')} {rank} {next(_numbers)}")
        self._sees_lost_peers = self._chance.random() < 0.5  # only some transports do: shared memory does not
        self._mode = int(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"))
        self._dump_time = 4 * float(os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000")) / 1000

    def connect(self, meet: Callable[[], object] = lambda: None) -> None:
        """Collective. DistBackendError if it was aborted, a peer is lost or late, or two ranks use one GPU.

        `meet()` is called after this has begun, which does not block. Then no abort reaches it any more.
        """
        if self._aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted")
        live.add(self)
        try:
            self._mesh.begin(self._store)
            meet()
            with self._waiting:
                if self._aborted.is_set():
                    raise dist.DistBackendError("NCCL communicator was aborted while it was made")
                self._mesh.connect(self._store, self._timeout_of_connect)
        except BaseException as error:
            self._mesh.close()
            if not self._can_abort:
                self._free()
            if isinstance(error, PeerLost | TimeoutError):
                raise dist.DistBackendError(f"NCCL error: {error}") from None
            raise
        self._can_abort = self._is_connected = True
        for loop, name in ((self._run_stream, "stream"), (self._watch, "watchdog")):
            threading.Thread(target=loop, name=f"nccl-{name}", daemon=True).start()

    def enqueue(self, task: Task, outputs: Sequence[torch.Tensor], timeout: timedelta | None = None) -> Work:
        """Begin a work; first connect, if it is the first one. DistBackendError if this communicator was aborted."""
        if not self._is_connected:
            self.connect()
        work = Work(task, outputs, timeout or self._timeout)
        with self._mutex, self._adding:
            if self._aborted.is_set() or self._freed.is_set():
                raise dist.DistBackendError("NCCL communicator was aborted")
            self.begun += 1
            self._last = work
            self._works.put(work)
        return work

    def synchronize(self) -> None:
        """Wait for all works that have begun."""
        if self._last is not None:
            self._last.wait()

    def abort(self) -> None:
        """End all works at once, then free this communicator, which takes time. Nothing while this connects in blocking mode."""
        if not self._can_abort or self._freed.is_set():
            return
        with self._waiting, self._aborting:
            if not self._aborted.is_set():
                with self._adding:
                    self._aborted.set()
                    self._works.put(None)
                self._mesh.abort()
                sleep(ABORT_TIME)
        self._free()

    def shutdown(self) -> None:
        """Wait for all works, and for all peers to do the same: it hangs if one is lost, until an abort."""
        if self._aborted.is_set() or self._freed.is_set() or not self._is_connected:
            return
        everybody = [(peer, torch.zeros(1, dtype=torch.uint8)) for peer in range(self._mesh.size)]
        del everybody[self._mesh.rank]
        self._works.put(last := Work(lambda mesh: mesh.exchange(everybody, everybody) or (), (), self._timeout))
        self._works.put(None)
        last.wait()
        self._free()

    def _free(self) -> None:
        self._freed.set()
        live.discard(self)

    def _run_stream(self) -> None:
        while (work := self._works.get()) is not None:
            self._running = work
            self._run(work)
            self._running = None
            work.end()
        self._mesh.close()

    def _run(self, work: Work) -> None:
        try:
            if self._aborted.is_set():
                raise Aborted
            values = work.task(self._mesh)
        except PeerLost as error:
            self._lost = str(error)
            self._aborted.wait()
        except Aborted:
            pass
        else:
            for output, value in zip(work.outputs, values, strict=True):
                output.data.copy_(value.view_as(output))
            return
        for output in work.outputs:
            self._fill_with_garbage(output.data)

    def _fill_with_garbage(self, output: torch.Tensor) -> None:
        """All of it, a part of it, or nothing: wherever the kernel was when it was ended."""
        flat = output.reshape(-1) if output.is_contiguous() else output[:0].reshape(-1)
        count = self._chance.choice((0, flat.numel(), self._chance.randint(0, flat.numel())))
        data = flat[:count].view(torch.uint8)
        noise = torch.frombuffer(bytearray(self._chance.randbytes(NOISE)), dtype=torch.uint8)
        data.copy_(noise.repeat(len(data) // NOISE + 1)[: len(data)])

    def _watch(self) -> None:
        while not self._freed.wait(WATCHDOG_PERIOD):
            running = self._running
            if self._lost and self._sees_lost_peers:
                self.error = self._lost
            elif running is not None and monotonic() - running.begun_at > running.most:
                self.error = "timeout"
            if self.error:
                self._act()
                return

    def _act(self) -> None:
        with self._mutex:
            sleep(self._dump_time)
        if self._freed.is_set():
            return
        if self._mode in DIE:
            os.write(2, f"NCCL's watchdog ends this process: {self.error}\n".encode())
            os.abort()
        if self._mode in CLEAN_UP:
            self.abort()
