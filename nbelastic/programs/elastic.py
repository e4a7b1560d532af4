"""The loop around the user's function: it calls the function once in each world, until it returns."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from nbelastic.errors import JobStoppedError, NoWorldError, StateError, UsageError
from nbelastic.programs.commit_cells import CommitCells
from nbelastic.programs.forked_children import end_forked_children
from nbelastic.programs.frameworks import Watch
from nbelastic.programs.swap import Swap
from nbelastic.protocol.events import WorkerSucceeded
from nbelastic.state.checkpoint_files import reason
from nbelastic.state.ddp_patch import unchanged_by_ddp
from nbelastic.state.state import State
from nbelastic.worker import session as _session
from nbelastic.worker.error_text import chain
from nbelastic.worker.interrupts import ProgramRejected, WorldAborted, WorldLeft
from nbelastic.worker.own_errors import is_of_program
from nbelastic.worker.session import Session
from nbelastic.worker.threads import run_in_thread

GPU_TIMEOUT = 10.0  # seconds; an aborted step's kernels end within this time

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def elastic(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate `function(state, …)`: call it from its top in each world that this worker is in, until it returns.

    At each call `torch.distributed` is initialised, and `state` is the newest commit, the same on all ranks. The decorated
    function returns what the last call returns. An exception of the function ends the job with its traceback. An exception
    that a lost worker has caused does not: the function is called again in the next world. One elastic function per job.

    The idea is Horovod Elastic's `hvd.elastic.run`; here the driver decides what caused an exception.
    """
    if not callable(function):
        raise UsageError(f"nbe.elastic decorates a function(state, …), not {type(function).__name__}.")

    @functools.wraps(function)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        if not isinstance(state, State):
            raise UsageError(
                f"an elastic function's first argument must be an nbelastic state, not {type(state).__name__}."
            )
        loop = _Loop(_session.current(), state, functools.partial(function, state, *args, **kwargs))
        del state, args, kwargs  # a new program may replace this one: then it is to free its memory
        return loop.run()  # type: ignore[no-any-return]

    return wrapper  # type: ignore[return-value]  # mypy minds that its first argument has a name


def warmup(function: Callable[[Any], object]) -> Callable[[Any], object]:
    """Decorate `function(state)`: each worker calls it once, before it reports that it is ready to join a world.

    A newcomer does there, beside the training of the others, what makes a first step slow: `torch.compile`, autotuning, the
    first batch of a DataLoader. Its changes of the state are undone afterwards. There is no world: it may use no collective
    and no DDP. Decorate it in the program, before the elastic function is called. Outside a worker this does nothing.
    """
    if not callable(function):
        raise UsageError(f"nbe.warmup decorates a function(state), not {type(function).__name__}.")
    with contextlib.suppress(NoWorldError):
        _session.current().warm_ups.append(function)
    return function


class _Loop:
    """The session calls `position`, `write_kept_state` and so on: see `StateHolder`."""

    def __init__(self, session: Session, state: State, call: Callable[[], Any]) -> None:
        if session.used:
            raise UsageError("this job has run an elastic function already: put both parts into one, or run two jobs.")
        session.used = True
        self._session = session
        self._state = state
        self._call = call
        self._own_error: BaseException | None = None
        self.commit_cells = CommitCells(session, state)
        self.swap = Swap(session, self)

    @property
    def state(self) -> State:
        return self._state

    def run(self) -> Any:
        try:
            self.swap.begin_state()
            self._warm_up()
            self._session.holder = self
            return self._loop()
        except JobStoppedError:
            if not self.swap.is_over and not self._session.programs.on_trial:
                self._state.undo()  # in the middle of a step, buffers and counters belong to no commit
                self._write_final_checkpoint()
            raise
        finally:
            self._session.holder = None
            self.swap.end_state()

    def program_kept(self) -> None:
        """The driver has accepted the new program that this loop runs: the old one is over."""
        self.swap.keep()
        self.committed()

    def forget(self) -> None:
        """Another program has replaced this one: free its memory."""
        del self._state, self._call, self.commit_cells

    def _warm_up(self) -> None:
        """Call the program's warm-up functions, and return to the values from before."""
        functions, self._session.warm_ups = self._session.warm_ups, []
        if functions:
            self._state._record_all()
            for function in functions:
                function(self._state)
            self._state._modes.restore()
            State.undo(self._state)  # not `ShardedState`'s own, which returns to a commit of models that are bound

    @property
    def position(self) -> tuple[int, bool]:
        """The newest commit, and whether the live tensors are those of that commit, as far as is known."""
        is_unknown = self.swap.is_unequal or self._state._tensors.has_moved
        return self._state.commits, self._state.clean and not is_unknown

    def committed(self) -> None:
        """The state has made a commit, or has received one: rank 0 writes its step logs."""
        if not self._session.programs.on_trial:
            self._state._contents.committed(is_rank_0=self._session.is_rank_0)

    def hand_over(self, leaving: tuple[int, ...]) -> None:
        """Collective: the ranks `leaving` end after this commit, and send what only they hold to others."""
        self._state.hand_over(leaving)

    def finish_copies(self) -> None:
        """A new program is to be tried: a rank that is lost meanwhile takes no commit with it that is being copied."""
        self._state.finish_copies()

    def write_last_checkpoint(self) -> None:
        """The job is stopped and the main thread hangs: the link thread writes the newest commit.

        StateError if the GPU does not finish its work: a copy would wait for it without end.
        """
        plan = self._session.checkpoints
        if plan is not None and self._session.facts.holds_state:
            self._wait_for_gpu()
            self._state.undo()
            self._write_final_checkpoint()
            plan.finish()

    def write_kept_state(self, folder: Path) -> int:
        """The job goes on and no other worker has its state: write the newest commit for another worker of this host."""
        try:
            self._wait_for_gpu()
            self._state.undo()
            self._state._kept.write_kept(self._state, folder)
        except BaseException as error:
            text = f"nbelastic: the training state could not be kept: {reason(error)}\n"
            os.write(2, text.encode())  # the output buffer is not sent any more
            raise
        return self._state.commits

    def _wait_for_gpu(self) -> None:
        """Wait until it has finished all work. StateError if it does not in time: a kernel hangs, or the GPU has failed."""
        if self._session.groups.uses_gpu:
            working = run_in_thread(lambda: self._session.groups.synchronize(all_streams=True))
            try:
                working.result(GPU_TIMEOUT)
            except TimeoutError:
                text = (
                    f"the GPU does not finish its work within {GPU_TIMEOUT:g} s, so the state cannot be read from it."
                )
                raise StateError(text) from None

    def load_kept_state(self, folder: Path, commit: int) -> None:
        """Load the state that another worker wrote. StateError if it is not this commit, or not complete."""
        self._state._kept.load_kept(self._state, folder, commit)

    def _write_final_checkpoint(self) -> None:
        """Write the job's last checkpoint, if it has any; also of a job that was stopped."""
        session = self._session
        if session.checkpoints is not None and session.facts.holds_state:
            session.checkpoints.ended(self._state, session.last_turn)

    def _loop(self) -> Any:
        again = False
        while True:
            outcome, value = self._run_generation(again)
            if outcome == "returned":
                return value
            if self._own_error is not None:
                error, self._own_error = self._own_error, None
                raise error
            again = True
            try:
                self._state.generation_ended(aborted=outcome == "aborted")
            except RuntimeError as error:
                is_of_program(error, self._session.groups)  # it ends this process if its GPU has failed
                raise
            if self._session.programs.ordered is not None:
                self.swap.run(self._session.programs.ordered)

    def _run_generation(self, again: bool) -> tuple[str, Any]:
        """Call the function in one generation. Keep no exception of it: a traceback would keep the old group alive."""
        session = self._session
        try:
            formation, offer = session.gather(self)
        except WorldLeft:  # a new program is to be run
            return "left", None
        try:
            self._enter(formation, offer, again)
            frameworks().check()
            contents, tensors = self._state._contents, self._state._tensors
            with (
                unchanged_by_ddp(contents, tensors, lambda: session.check(contents.device()), session.on_any_rank),
                end_forked_children(),
            ):
                value = self._call()
            self.swap.check_kept()
            session.finish_gpu_work()  # a collective that was aborted on the GPU may have ended the function
            self._write_final_checkpoint()
            session.succeed(WorkerSucceeded(session.worker, formation.generation))
        except WorldLeft:
            return "left", None
        except WorldAborted:
            return "aborted", None
        except ProgramRejected:
            raise
        except BaseException as error:
            if session.programs.on_trial and is_of_program(error, session.groups):
                raise
            if session.is_own_error(error):
                self._own_error = error
                return "raised", None
            _drop_tracebacks(error)
            return "aborted", None
        return "returned", value

    def _enter(self, formation: Any, offer: Any, again: bool) -> None:
        """Form the group, bring the state up to date, run the reset callbacks."""
        start = time.monotonic()
        self._session.join(formation, offer)
        joined = time.monotonic()
        if again and formation.rank == formation.root and not self._state._is_sharded:
            self._state._steps.tell_what_is_kept(self._state.commits)
        self._state.sync(formation)
        self.swap.is_unequal = False
        self.committed()
        synced = time.monotonic()
        if again:
            for callback in self._state.reset_callbacks:
                callback()
        if self._session.checkpoints is not None:
            self._session.checkpoints.begun = True
        self._session.formed({"form": (joined - start) * 1000, "sync": (synced - joined) * 1000})


@functools.cache
def frameworks() -> Watch:
    """The one watch of this process, which starts at the first call."""

    def size() -> int:
        session = _session.current()
        is_inside = session.holder is not None  # the group stays after the elastic function has returned
        return session.formation.world_size if is_inside and session.formation is not None else 0

    watch = Watch(size)
    watch.start()
    return watch


def _drop_tracebacks(error: BaseException | None) -> None:
    """Drop the tracebacks of an exception and of its causes: their frames refer to the old group."""
    for one in chain(error):
        one.__traceback__ = one.__cause__ = one.__context__ = None
