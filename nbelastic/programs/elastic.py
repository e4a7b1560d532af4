"""The loop around the user's function, and who am I: `rank()`, `size()` and their kin."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from nbelastic.errors import JobStoppedError, UsageError
from nbelastic.programs.frameworks import Watch
from nbelastic.protocol.events import WorkerSucceeded
from nbelastic.state import checkpoints as saving
from nbelastic.state.checkpoint_files import reason
from nbelastic.state.ddp_patch import wrapping
from nbelastic.state.state import State
from nbelastic.worker import session as _session
from nbelastic.worker.session import Session, WorldAborted, WorldLeft

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def elastic(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate `function(state, …)`: it is called from its top in every world this worker is in, until it returns.

    When it is called, `torch.distributed` is initialised and `state` is the same on all ranks: the newest commit. The
    returned value is the last call's. An exception of the function's own ends the job with its traceback; one that
    comes of a lost worker does not: the function is called again in the next world. One elastic function a job.

    The idea is Horovod Elastic's `hvd.elastic.run`; here it is the driver who says what an exception was.
    """
    if not callable(function):
        raise UsageError(f"nbe.elastic decorates a function(state, …), not {type(function).__name__}.")

    @functools.wraps(function)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        if not isinstance(state, State):
            raise UsageError(
                f"an elastic function's first argument must be an nbelastic state, not {type(state).__name__}."
            )
        return _Loop(_session.current(), state).run(functools.partial(function, state, *args, **kwargs))

    return wrapper  # type: ignore[return-value]  # mypy minds that its first argument has a name


class _Loop:
    def __init__(self, session: Session, state: State) -> None:
        if session.used:
            raise UsageError("this job has run an elastic function already: put both parts into one, or run two jobs.")
        session.used = True
        self._session = session
        self._state = state
        self._own: BaseException | None = None

    def run(self, call: Callable[[], R]) -> R:
        try:
            self._state.begin(self._session)
            self._session.holder = self
            return self._loop(call)
        except JobStoppedError:
            self._state.undo()  # it may come in the middle of a step: buffers and counters are those of no commit then
            self._keep()
            raise
        finally:
            self._session.holder = None
            self._state.end()

    @property
    def position(self) -> tuple[int, bool]:
        return self._state.commits, self._state.clean

    def rescue(self) -> None:
        """The job is stopped, and the main thread will not wake up any more: the link's thread keeps the last commit."""
        plan = self._session.checkpoints
        if plan is not None and self._session.account.holds:
            self._state.undo()
            self._keep()
            plan.finish()

    def keep(self, folder: Path) -> int:
        """The same of a job that goes on, if nobody else holds its state: it is written for another process of this host."""
        try:
            self._state.undo()
            saving.keep(self._state, folder)
        except BaseException as error:
            text = f"nbelastic: the training state could not be kept: {reason(error)}\n"
            os.write(2, text.encode())  # what is printed would not be sent any more
            raise
        return self._state.commits

    def take(self, folder: Path, commit: int) -> None:
        saving.take_kept(self._state, folder, commit)

    def _keep(self) -> None:
        """The last checkpoint, if the job has them: also of a job that was stopped."""
        if self._session.checkpoints is not None and self._session.account.holds:
            self._session.checkpoints.ended(
                self._state, self._session.last_rank if self._session.link.disconnected else 0
            )

    def _loop(self, call: Callable[[], R]) -> R:
        again = False
        while True:
            gathered, offer = self._session.gather(self)
            outcome, value = self._live(call, gathered, offer, again)
            if outcome == "returned":
                return value  # type: ignore[return-value]
            if self._own is not None:
                error, self._own = self._own, None
                raise error
            again = True
            if outcome == "aborted":
                self._state.undo()

    def _live(self, call: Callable[[], R], formation: Any, offer: Any, again: bool) -> tuple[str, R | None]:
        """One generation. Nothing that it raised may outlive it: a traceback would keep the old group alive."""
        session = self._session
        try:
            self._enter(formation, offer, again)
            frameworks().check()
            with wrapping(self._state._tensors):
                value = call()
            self._keep()
            session.succeed(WorkerSucceeded(session.worker, formation.generation))
        except WorldLeft:
            return "left", None
        except WorldAborted:
            return "aborted", None
        except BaseException as error:  # noqa: BLE001  (whatever it is, the driver says whose fault it was)
            if session.judge(error):
                self._own = error
                return "raised", None
            _forget(error)
            return "aborted", None
        return "returned", value

    def _enter(self, formation: Any, offer: Any, again: bool) -> None:
        """Form the group, bring the state up to date, run the reset callbacks."""
        start = time.monotonic()
        self._session.join(formation, offer)
        joined = time.monotonic()
        self._state.sync(formation)
        synced = time.monotonic()
        took = {"form": (joined - start) * 1000, "sync": (synced - joined) * 1000}
        if again:
            for callback in self._state.reset_callbacks:
                callback()
        self._session.formed(took)


@functools.cache
def frameworks() -> Watch:
    """One in each process, at work since it was first asked for."""

    def size() -> int:
        session = _session.current()
        inside = session.holder is not None  # the group stays after the elastic function has returned
        return session.formation.world_size if inside and session.formation is not None else 0

    watch = Watch(size)
    watch.start()
    return watch


def _forget(error: BaseException | None) -> None:
    """Cut the tracebacks of an exception and all that are behind it: their frames hold the old group."""
    open_ends = [error]
    while open_ends:
        one = open_ends.pop()
        if one is None:
            continue
        open_ends += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
        one.__traceback__ = one.__cause__ = one.__context__ = None


def rank() -> int:
    """The rank of this worker in the present world, 0 to size() - 1. NoWorldError outside an elastic function."""
    return _session.world().rank


def size() -> int:
    """The number of workers in the present world (world size). NoWorldError outside an elastic function."""
    return _session.world().world_size


def local_rank() -> int:
    """The rank among the workers of this host. Not the GPU's number: that is `device()`."""
    return _session.world().local_rank


def local_size() -> int:
    """The number of workers of this host in the present world."""
    return _session.world().local_size


def cross_rank() -> int:
    """The position of this host among the hosts that have a worker of this local rank (Horovod's meaning)."""
    return _session.world().cross_rank


def cross_size() -> int:
    """The number of hosts that have a worker of this local rank."""
    return _session.world().cross_size


def device() -> torch.device:
    """The device of this worker: `cuda:<slot>` for the life of its process, or the CPU."""
    return _session.device(_session.current().worker.slot)


def local_group() -> dist.ProcessGroup:
    """The process group of this host's workers. Collective on first use in each world: all ranks must call it."""
    return _groups()[0]


def cross_group() -> dist.ProcessGroup:
    """The process group of the workers with this local rank, one a host. Collective on first use, as `local_group`."""
    return _groups()[1]


def _groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Both at once, so that all ranks make them in the same order whichever they ask for first."""
    formation, group = _session.world(), _session.current().group
    assert group is not None
    if group.subgroups is None:
        by_host, start = [], 0
        for _, count in formation.hosts:
            by_host.append(list(range(start, start + count)))
            start += count
        most = max(len(ranks) for ranks in by_host)
        across = [[ranks[i] for ranks in by_host if i < len(ranks)] for i in range(most)]
        local, _ = dist.new_subgroups_by_enumeration(by_host)
        cross, _ = dist.new_subgroups_by_enumeration(across)
        group.subgroups = (local, cross)
    found: tuple[dist.ProcessGroup, dist.ProcessGroup] = group.subgroups
    return found
