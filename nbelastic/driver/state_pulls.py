"""Training states on their way to a client: as bytes, which the driver never unpickles."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from nbelastic.core.state import ClusterState
from nbelastic.driver.cells import Cells
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.jobs import Jobs
from nbelastic.driver.pending import Pending
from nbelastic.driver.results import Outcome, Results
from nbelastic.driver.workers import Workers
from nbelastic.errors import NbelasticError, UsageError
from nbelastic.protocol import cell_messages, messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.requests import PullState
from nbelastic.system.future_results import resolve_if_pending
from nbelastic.system.private_files import make_private

LIMIT = 300.0  # seconds that the training may stand still while rank 0 copies its state
TRIES = 3  # commits at which rank 0 is asked
ADVICE = "It is in a checkpoint if the job was run with checkpoint=FOLDER."


class StatePulls:
    """Lives in the driver's thread. `folder`: where workers of this machine write states."""

    def __init__(
        self,
        folder: Path,
        *,
        cluster: Callable[[], ClusterState],
        cells: Cells,
        jobs: Jobs,
        workers: Workers,
        pending: Pending,
    ) -> None:
        self._cluster, self._cells, self._jobs, self._pending = cluster, cells, jobs, pending
        self._results = Results(folder, lambda w, message: workers.send((w,), message), "the training state")
        self._turn = asyncio.Lock()  # of one pull at a time: a worker keeps one state for a driver that fetches it
        self._numbers = itertools.count(time.time_ns())  # unique among all drivers of the cluster
        self._tasks: set[asyncio.Task[None]] = set()
        self._arriving: dict[str, Future[Outcome]] = {}  # states on their way, by key
        self._senders: dict[str, WorkerId] = {}  # of those that a worker has copied
        self._results.remove_all_but(())  # what an earlier driver has left

    def pull(self, request: PullState, result: Future[messages.Blob]) -> None:
        """Resolve `result` with the state. UsageError if this job has none, or none any more."""
        run = self._jobs.runs.get(request.job)
        if run is None or request.job != next(reversed(self._jobs.runs)):
            raise UsageError(
                f"a later job has begun, so the workers have dropped the training state of {request.job}. {ADVICE}"
            )
        script = self._cluster().script
        if script is not None and script.job == request.job:
            raise UsageError(f"{request.job} is a script: its workers do not share their state with nbelastic.")
        self._pending.track(result)
        task = asyncio.get_running_loop().create_task(self._pull(request, run, result))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        result.add_done_callback(lambda _: task.cancel())

    async def _pull(self, request: PullState, run: JobRun, result: Future[messages.Blob]) -> None:
        key = f"state-{next(self._numbers)}"
        folder = self._results.folder(key)
        pull = cell_messages.Pull(request.job, request.name, key, str(folder))
        value, failure = None, None
        try:
            make_private(folder)
            async with self._turn:
                self._arriving[key] = Future()
                self._senders[key] = await self._at_commit(pull) or await self._after_the_end(pull, run)
                value = await self._value(key)
        except NbelasticError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  (whatever it is, the client waits for it)
            failure = UsageError(f"the training state cannot be saved in {folder}: {type(error).__name__}: {error}.")
        finally:
            self._arriving.pop(key, None)
            self._senders.pop(key, None)
            if value is None or result.cancelled():  # before the client gets its answer
                self._results.remove(key)
        if value is not None:
            resolve_if_pending(result.set_result, value)
        elif failure is not None:
            resolve_if_pending(result.set_exception, failure)

    async def _at_commit(self, pull: cell_messages.Pull) -> WorkerId | None:
        """Rank 0, which has copied its state at the next commit; None if the training has ended, also meanwhile."""
        for _ in range(TRIES):
            job = self._cluster().active
            if job is None or job.succeeded:
                return None
            results: Future[list[cell_messages.CellResult]] = Future()
            self._cells.pull_at_commit(pull, LIMIT, results)
            answers = await asyncio.wrap_future(results)
            if answers and answers[0].error:
                raise UsageError(f"{answers[0].error}.")
            if answers:
                return answers[0].worker
        raise UsageError(f"rank 0 was lost {TRIES} times, or did not copy its state within {LIMIT:g} s.")

    async def _after_the_end(self, pull: cell_messages.Pull, run: JobRun) -> WorkerId:
        """The first rank that still holds the state. UsageError if none does."""
        await _end_of(run)
        reason = f"the workers that held the training state of {pull.job} have ended. {ADVICE}"
        for w in run.members:
            if w not in self._cluster().workers:
                continue
            results: Future[list[cell_messages.CellResult]] = Future()
            self._cells.pull_kept(w, pull, results)
            for answer in await asyncio.wrap_future(results):
                if not answer.error:
                    return w
                reason = f"{answer.error}."
        raise UsageError(reason)

    async def _value(self, key: str) -> messages.Blob:
        """The state, when it has arrived. UsageError if it does not."""
        self.forget([w for w in [self._senders[key]] if w not in self._cluster().workers])  # lost a moment ago
        found = await asyncio.wrap_future(self._arriving[key])
        if found.value is None:
            raise UsageError(f"{found.error}.")
        return found.value

    def receive(self, pulled: cell_messages.StatePulled) -> None:
        """A worker has copied its state. If no client waits for it any more, it is dropped."""
        arriving = self._arriving.get(pulled.key)
        if arriving is not None:
            result = worker_messages.ProgramResult(pulled.worker, pulled.key, pulled.error, value=pulled.state)
            self._results.receive(result, partial(resolve_if_pending, arriving.set_result))

    def receive_piece(self, piece: worker_messages.ResultPiece) -> None:
        """Take the next bytes of a state from another machine."""
        self._results.receive_piece(piece)

    def forget(self, workers: Collection[WorkerId]) -> None:
        """These workers are lost, with the states that they were sending."""
        self._results.forget(workers)
        for key, w in self._senders.items():
            if w in workers:
                lost = Outcome(f"{w} was lost while it sent the training state: try again")
                resolve_if_pending(self._arriving[key].set_result, lost)


async def _end_of(run: JobRun) -> None:
    """Wait until the job has ended, in whichever way."""
    ended = asyncio.Event()
    run.future.add_done_callback(lambda _: ended.set())
    await ended.wait()
