"""How nbelastic makes, connects, aborts and waits for the communicators of NCCL.

`Accelerator` is the seam: `Nccl` serves ProcessGroupNCCL, torch's engine up to 2.13 and, with TORCH_DIST_USE_NCCL2=0, in
newer versions. `dist._reconfigure` (torch ≥ 2.14) is not used until it has been seen to work on GPUs.

A collective on an accelerator runs later, on a stream. After an abort its `wait()` returns as if it had succeeded, and its
output holds garbage. So a result may be used only after `synchronize` and a look at whether the generation is over.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nbelastic.protocol.exit_codes import HUNG

Make = Callable[[Any, int, int, Any], Any]  # a store, a rank, a size and options -> a communicator

ABORT_TIMEOUT = 30.0  # seconds; NCCL takes up to a second, and longer with many kernels under way
MOST_ABORTS = 2  # that may be under way while a new communicator connects
MIN_FREE = 1 << 30  # bytes of GPU memory for one more communicator


class Accelerator(Protocol):
    """A kind of device whose collectives have a back end of their own. A communicator is torch's back end of one group."""

    backend: str  # for torch.distributed.init_process_group

    def options(self, timeout: timedelta) -> Any:
        """The options of a communicator; `timeout`: of a collective."""

    def create(self, store: Any, rank: int, size: int, options: Any) -> Any:
        """A communicator that has not communicated yet."""

    def make_room(self) -> bool:
        """Whether the device has memory for one more communicator, if torch gives back what it keeps unused."""

    def connect(self, communicator: Any, meet: Callable[[], object]) -> None:
        """Collective: connect to the other members. In any thread; raises what torch raises, also after an abort.

        `meet` waits until all members have called it, or raises after an abort.
        """

    def abort(self, communicator: Any) -> None:
        """End its collectives, which may take seconds. In any thread."""

    def error(self, communicator: Any) -> str:
        """The error of a collective that did not end, or an empty string."""

    def synchronize(self, *, all_streams: bool = False) -> None:
        """Wait for the work of the present stream, or of all streams of this process."""

    def use_for_new_groups(self, make: Make | None) -> None:
        """Let torch call `make` for the communicator of each new group; None: torch makes it alone again."""


class Factory:
    """Replaces one of torch's classes of back ends: torch calls `make` instead of the class."""

    def __init__(self, original: Any, make: Callable[..., Any]) -> None:
        self._original, self._make = original, make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._make(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __instancecheck__(self, thing: Any) -> bool:
        return isinstance(thing, self._original)


class Nccl:
    """NCCL on this worker's GPU, which is the only one that this process sees."""

    backend = "cpu:gloo,cuda:nccl"

    def __init__(self) -> None:
        self._class: Any = getattr(dist, "ProcessGroupNCCL", None)  # None: this torch has no CUDA

    def options(self, timeout: timedelta) -> Any:
        """See `Accelerator.options`."""
        options = self._class.Options()
        options._timeout = timeout
        return options

    def create(self, store: Any, rank: int, size: int, options: Any) -> Any:
        """Nonblocking: torch cannot abort a communicator of the other kind while it connects."""
        options.config.blocking = 0
        return self._class(store, rank, size, options)

    def make_room(self) -> bool:
        """See `Accelerator.make_room`."""
        if torch.cuda.mem_get_info()[0] < MIN_FREE:
            torch.cuda.empty_cache()
        return bool(torch.cuda.mem_get_info()[0] >= MIN_FREE)

    def connect(self, communicator: Any, meet: Callable[[], object]) -> None:
        """Sum one number: that waits until all members are connected, and opens the channels that training uses.

        During that wait torch holds a lock that an abort needs. So first all members begin to connect, which does not block.
        Then NCCL ends the wait if a member dies, and torch does after TORCH_NCCL_NONBLOCKING_TIMEOUT.
        """
        where = torch.device("cuda", torch.cuda.current_device())
        communicator.eager_connect_single_device(where)
        meet()
        stream = torch.cuda.Stream()  # beside the training
        with torch.cuda.stream(stream):
            one = torch.ones(1, device=where)
            communicator.allreduce([one]).wait()
        stream.synchronize()

    def abort(self, communicator: Any) -> None:
        """See `Accelerator.abort`."""
        communicator.abort()

    def error(self, communicator: Any) -> str:
        """What NCCL's watchdog has seen: it only records errors, see `NCCL_ENVIRONMENT`."""
        found = communicator.get_error()
        return "" if found.name == "SUCCESS" else f"NCCL reports {found.name}"

    def synchronize(self, *, all_streams: bool = False) -> None:
        """See `Accelerator.synchronize`."""
        if torch.cuda.is_initialized():
            if all_streams:
                torch.cuda.synchronize()
            else:
                torch.cuda.current_stream().synchronize()

    def use_for_new_groups(self, make: Make | None) -> None:
        """See `Accelerator.use_for_new_groups`."""
        replaced = self._class if make is None else Factory(self._class, make)
        dist.distributed_c10d.ProcessGroupNCCL = replaced


NCCL: Accelerator = Nccl()


def accelerator_for(backend: str) -> Accelerator | None:
    """The accelerator of a job's back end: `nccl`, or None for `gloo`."""
    return NCCL if backend == "nccl" else None


class Communicators:
    """The communicators of one generation: of torch's default group, and of the groups that the program makes.

    `abort`, `wait` and `error` may be called in any thread.
    """

    def __init__(self, accelerator: Accelerator, earlier: Sequence[Communicators] = ()) -> None:
        """`earlier`: those of the worlds before, the last one's at the end."""
        self._accelerator = accelerator
        self._earlier = earlier
        self._prepared: Any = None  # for the default group
        self._made: list[Any] = []
        self._aborts: dict[int, Future[None]] = {}  # by the communicator's id

    @property
    def backend(self) -> str:
        """What torch calls this back end."""
        return self._accelerator.backend

    def wait_for_earlier(self) -> None:
        """Wait for the aborts of earlier worlds, but not for the last ones: NCCL takes 0.5 s and more to end its threads.

        With too little memory wait for those too, as they free some.
        """
        must_end = self._earlier[:-MOST_ABORTS] if self._accelerator.make_room() else self._earlier
        self._earlier = ()  # each holds those before it, with all their memory
        end = time.monotonic() + ABORT_TIMEOUT
        if not all(each.wait(max(0.0, end - time.monotonic())) for each in must_end):
            os._exit(HUNG)  # no operation on this GPU will end in this process

    def prepare(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        """Collective: make the communicator of the default group. Raises what torch raises, also after an abort."""
        self._prepared = self._connect(store, rank, size, self._accelerator.options(timeout))

    def use_for_new_groups(self) -> None:
        """All communicators that torch makes from now on belong to this generation."""
        self._accelerator.use_for_new_groups(self._make)

    def release(self) -> None:
        """Torch makes communicators alone again."""
        self._accelerator.use_for_new_groups(None)

    def _make(self, store: Any, rank: int, size: int, options: Any) -> Any:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            return prepared
        return self._connect(store, rank, size, options)

    def _connect(self, store: Any, rank: int, size: int, options: Any) -> Any:
        """Make a communicator. The members wait for each other in the store, where an abort reaches them."""

        def meet() -> None:
            if size > 1:
                store.set(f"met/{rank}", "")
                store.wait([f"met/{other}" for other in range(size)])

        self._accelerator.make_room()
        made = self._accelerator.create(store, rank, size, options)
        self._made.append(made)  # before it connects: an abort must reach it
        try:
            self._accelerator.connect(made, meet)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # an abort may have come before there was anything to abort
                self._accelerator.abort(made)
            raise
        return made

    def abort(self) -> None:
        """Abort each in a thread of its own: an abort may wait for another communicator's. To be repeated."""
        self._earlier = ()
        for communicator in [*self._made]:
            done: Future[None] = Future()
            if self._aborts.setdefault(id(communicator), done) is done:
                arguments = (communicator, done)
                threading.Thread(target=self._abort, args=arguments, name="nbelastic-abort", daemon=True).start()

    def _abort(self, communicator: Any, done: Future[None]) -> None:
        try:
            with contextlib.suppress(RuntimeError):  # it was never connected, or the device has failed
                self._accelerator.abort(communicator)
        finally:
            done.set_result(None)

    def wait(self, timeout: float) -> bool:
        """Wait for the aborts that have begun; returns whether they have ended after `timeout` seconds."""
        return not wait([*self._aborts.values()], timeout).not_done

    def error(self) -> str:
        """The first error that one of them has, or an empty string."""
        return next(filter(None, map(self._accelerator.error, [*self._made])), "")
