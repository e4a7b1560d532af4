"""Cells on workers: sends them, collects their results, and tries setup cells."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState, WorkerState
from nbelastic.driver.agents import Agents
from nbelastic.driver.code_versions import CodeVersions
from nbelastic.driver.pending import Pending
from nbelastic.driver.workers import Workers
from nbelastic.errors import UsageError
from nbelastic.protocol import cell_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.requests import (
    CellOutput,
    CommitOutput,
    ExecuteAtCommit,
    OnPiece,
    Piece,
    cell_output,
    ignore_piece,
)
from nbelastic.system import pickling
from nbelastic.system.private_files import make_private

JOB_ENDED = "the training has ended"
T = TypeVar("T")
UNFINISHED = "the cell did not end: a worker died, or the cell did not come to its end in time. The training goes on."


class _AtCommit:
    """A cell that runs at a commit, or will."""

    def __init__(self, number: int, source: str, pull: cell_messages.Pull | None = None) -> None:
        self.number = number
        self.source = source
        self.pull = pull
        self.ranks: dict[WorkerId, int] = {}  # of the workers that run it
        self.displays: dict[WorkerId, tuple[str, ...]] = {}
        self.results: dict[WorkerId, cell_messages.CellResult] = {}

    def output(self, w: WorkerId) -> CommitOutput:
        """What the cell has printed on this worker; an error if it has not ended there."""
        result, displays = self.results.get(w), self.displays.get(w, ())
        if result is None:
            return CommitOutput(self.ranks[w], str(w), "", "", UNFINISHED, displays)
        traceback = result.traceback or None
        return CommitOutput(self.ranks[w], str(w), result.stdout, result.stderr, traceback, displays)


class Cells:
    """Lives in the driver's thread; `post` puts events into its inbox."""

    def __init__(
        self,
        workers: Workers,
        agents: Agents,
        pending: Pending,
        code_versions: CodeVersions,
        *,
        post: Callable[[ev.Event], None],
        values: Path,
    ) -> None:
        """`values`: the folder for pushed values."""
        self._code_versions = code_versions
        self._workers, self._agents, self._pending, self._post = workers, agents, pending, post
        self._values = values
        self._new_values: set[str] = set()  # names of files there whose setup cell is not known yet
        self._pushed: dict[str, messages.Pushed] = {}  # that workers of other machines fetch, by key
        self._callbacks: dict[
            tuple[WorkerId, int], Callable[[cell_messages.CellResult], None]
        ] = {}  # of cells without a result
        self._on_piece: dict[int, OnPiece] = {}  # by cell, while a client waits for it
        self._numbers = itertools.count(time.time_ns())  # unique among all drivers of the cluster
        self._at_commit: dict[int, _AtCommit] = {}  # by number, while a client waits for it
        self._setup_results: dict[int, dict[WorkerId, CellOutput]] = {}  # by version, while a client waits for them

    def execute_on_all(
        self, cluster: ClusterState, source: str, results: Future[list[CellOutput]], on_piece: OnPiece
    ) -> None:
        """Run a cell on every ready worker; resolve `results` when each of them has answered or is lost.

        If `results` are cancelled, the cell is interrupted.
        """
        number = next(self._numbers)
        asked = {w for w, worker in cluster.workers.items() if worker.state is WorkerState.READY}
        if not asked:
            raise UsageError("no worker is ready to run the cell: %elastic_status shows why.")
        answers: dict[WorkerId, CellOutput] = {}

        def collect(cluster: ClusterState) -> list[CellOutput] | None:
            alive = [w for w in asked if w in cluster.workers]
            return _in_order(asked, answers) if all(w in answers for w in alive) else None

        for w in asked:

            def on_result(result: cell_messages.CellResult, w: WorkerId = w) -> None:
                answers[w] = cell_output(result)
                self._pending.check_and_publish()

            self._execute(w, source, on_result, number)
        self._pass_pieces(number, results, on_piece, lambda: asked - answers.keys())
        self._pending.resolve(results, collect)

    def _pass_pieces(
        self,
        number: int,
        results: Future[list[T]],
        on_piece: OnPiece,
        running: Callable[[], Iterable[WorkerId]] = tuple,
    ) -> None:
        """Pass on what this cell prints until its results are there. If they are cancelled, interrupt it where it is running."""

        def end(results: Future[list[T]]) -> None:
            self._on_piece.pop(number, None)
            if results.cancelled():
                self._workers.send(running(), cell_messages.InterruptCell(number))

        self._on_piece[number] = on_piece
        results.add_done_callback(end)

    def receive_piece(self, piece: cell_messages.CellPiece) -> None:
        """Take what a cell has just printed. Pieces that no client waits for are dropped."""
        run, rank = self._at_commit.get(piece.number), None
        if run is not None:
            rank = run.ranks.get(piece.worker)
            if piece.kind == "display":
                run.displays[piece.worker] = (*run.displays.get(piece.worker, ()), piece.text)
        on_piece = self._on_piece.get(piece.number)
        if on_piece is not None:
            on_piece(Piece(str(piece.worker), piece.kind, piece.text, rank))

    def execute_at_commit(
        self, request: ExecuteAtCommit, results: Future[list[CommitOutput]], on_piece: OnPiece
    ) -> None:
        """Run a cell at the next commit; resolve `results` when it has ended on all its ranks. If they are cancelled, so is it."""

        def collect(cluster: ClusterState, run: _AtCommit) -> list[CommitOutput]:
            if not run.ranks:
                trains = cluster.active is not None and not cluster.active.succeeded
                reason = f"there is no such rank: the world has {len(cluster.members)}" if trains else JOB_ENDED
                raise UsageError(f"the cell did not run: {reason}.")
            return [run.output(w) for w in run.ranks]

        run = _AtCommit(next(self._numbers), request.source)
        self._pass_pieces(run.number, results, on_piece)
        self._submit_at_commit(run, request.ranks, request.limit, results, collect)

    def pull_at_commit(
        self, pull: cell_messages.Pull, limit: float, results: Future[list[cell_messages.CellResult]]
    ) -> None:
        """Have rank 0 send its state at the next commit. `results` is empty if it did not: the training ended, or broke."""

        def collect(_: ClusterState, run: _AtCommit) -> list[cell_messages.CellResult]:
            return list(run.results.values())

        self._submit_at_commit(_AtCommit(next(self._numbers), "", pull), (0,), limit, results, collect)

    def _submit_at_commit(
        self,
        run: _AtCommit,
        ranks: tuple[int, ...],
        limit: float,
        results: Future[T],
        collect: Callable[[ClusterState, _AtCommit], T],
    ) -> None:
        """Resolve `results` with what `collect` returns when the cell has ended, or will not run."""
        number = run.number
        self._at_commit[number] = run

        def collect_at_end(cluster: ClusterState) -> T | None:
            return None if any(cell.number == number for cell in cluster.halt.cells) else collect(cluster, run)

        def forget(results: Future[T]) -> None:
            self._at_commit.pop(number, None)
            if results.cancelled():
                self._post(ev.CommitCellCancelled(number))

        results.add_done_callback(forget)
        self._pending.resolve_after(ev.CommitCellSubmitted(number, ranks, limit), results, collect_at_end)

    def run_at_commit(self, command: cmd.RunCommitCell, members: Sequence[WorkerId]) -> None:
        """The members stand still: run this cell on those of the command, and post its ends."""
        # If no client waits for it any more, its cancellation follows.
        run = self._at_commit.get(command.number, _AtCommit(command.number, ""))
        run.ranks = {w: members.index(w) for w in command.workers}
        cell = cell_messages.CommitCell(
            command.generation, command.number, run.source, command.limit, command.everywhere
        )
        for w in command.workers:
            self.receive_piece(cell_messages.CellPiece(w, command.number, "out", ""))
            self._callbacks[w, command.number] = partial(self._on_commit_cell_ended, run)
            self._workers.send((w,), replace(cell, pull=self._pull_on(w, run.pull)))

    def _on_commit_cell_ended(self, run: _AtCommit, result: cell_messages.CellResult) -> None:
        run.results[result.worker] = result
        self._post(ev.CommitCellEnded(result.worker, result.number, result.begun, result.changed))

    def pull_kept(self, w: WorkerId, pull: cell_messages.Pull, results: Future[list[cell_messages.CellResult]]) -> None:
        """Have a worker send the state that it holds after its job's end. `results` is empty if the worker is lost."""
        answers: list[cell_messages.CellResult] = []

        def on_result(result: cell_messages.CellResult) -> None:
            answers.append(result)
            self._pending.check_and_publish()

        def collect(cluster: ClusterState) -> list[cell_messages.CellResult] | None:
            return answers if answers or w not in cluster.workers else None

        number = next(self._numbers)
        self._callbacks[w, number] = on_result
        self._workers.send((w,), cell_messages.Cell(number, "", pull=self._pull_on(w, pull)))
        self._pending.resolve(self._pending.track(results), collect)

    def _pull_on(self, w: WorkerId, pull: cell_messages.Pull | None) -> cell_messages.Pull | None:
        """Another machine sees no folder of this one."""
        return pull if pull is None or self._agents.has_local_agent(w.host) else replace(pull, folder="")

    def try_setup(
        self,
        key: str,
        source: str,
        results: Future[list[CellOutput]],
        on_piece: OnPiece,
        pushed: messages.Pushed | None = None,
    ) -> None:
        """Try a setup cell; resolve `results` when its trial is over. They fail with UsageError if it cannot begin.

        If `results` are cancelled, the cell is interrupted.
        """
        version = time.time_ns()  # unique among all drivers of the cluster
        answers = self._setup_results[version] = {}
        tried: set[WorkerId] = set()

        def collect(cluster: ClusterState) -> list[CellOutput] | None:
            trial = cluster.trial
            if trial is not None and trial.cell.version == version:
                tried.update(trial.running)
                return None
            if not tried and not any(cell.version == version for cell in cluster.setup):
                raise UsageError(
                    "another setup cell or a job is still running: wait until it ends, "
                    "or restart the worker that does not end it."
                )
            return _in_order(tried, answers)

        results.add_done_callback(lambda _: self._setup_results.pop(version, None))
        self._pass_pieces(version, results, on_piece, lambda: tried - answers.keys())
        self._pending.resolve_after(ev.SetupSubmitted(key, source, version, pushed), results, collect)

    def run_setup(self, command: cmd.RunSetup) -> None:
        """Run a setup cell on one worker, and post its end."""
        w, version, pushed = command.worker, command.version, command.pushed

        def on_result(result: cell_messages.CellResult) -> None:
            if version in self._setup_results:
                self._setup_results[version][w] = cell_output(result)
            self._post(ev.SetupEnded(w, version, result.error))

        if pushed is not None and not self._agents.has_local_agent(w.host):
            self._pushed[cell_messages.push_key(version)] = pushed
            pushed = replace(pushed, values=replace(pushed.values, path=""))
        self._execute(w, command.source, on_result, version, pushed)

    def send_pushed(self, fetch: worker_messages.FetchCall) -> bool:
        """Send the next pieces of pushed values. False if `fetch` is for something else."""
        pushed = self._pushed.get(fetch.job)
        if pushed is None:
            return False
        with contextlib.suppress(OSError):  # newer values have replaced them
            for offset, data in pickling.pieces(pickling.mapped(Path(pushed.values.path)), fetch.offset):
                self._workers.send((fetch.worker,), worker_messages.CallPiece(fetch.job, offset, data))
        return True

    def push(self, pushed: messages.Pushed, results: Future[list[CellOutput]]) -> None:
        """Keep the file of the values, and set them on all workers, as a setup cell. UsageError if it cannot be kept."""
        path, size = Path(pushed.values.path), pushed.values.size
        try:
            make_private(self._values)
            path = path.rename(self._values / path.name)
        except OSError as error:
            raise UsageError(f"the pushed values cannot be kept in {self._values}: {error.strerror}.") from None
        self._new_values.add(path.name)
        pushed = replace(pushed, values=replace(pushed.values, path=str(path)))
        names = ", ".join(pushed.names)
        source = f"# pushed: {names} ({size / 1e6:,.1f} MB)"
        results.add_done_callback(lambda _: self._new_values.discard(path.name))
        self.try_setup(f"push:{names.replace(' ', '')}", source, results, ignore_piece, pushed)

    def remove_unused_values(self, cluster: ClusterState) -> None:
        """Remove the files of pushed values that no later worker will get, also those that an earlier driver has left."""
        cells = [*cluster.setup, *([cluster.trial.cell] if cluster.trial is not None else [])]
        used = {Path(cell.pushed.values.path).name for cell in cells if cell.pushed is not None}
        for path in self._values.glob("*"):
            if path.name not in used | self._new_values:
                with contextlib.suppress(OSError):
                    path.unlink()
        self._pushed = {key: pushed for key, pushed in self._pushed.items() if Path(pushed.values.path).name in used}

    def receive_result(self, result: cell_messages.CellResult) -> None:
        """Take what a cell has printed, and its error. Results of an earlier driver's cells are dropped."""
        on_result = self._callbacks.pop((result.worker, result.number), None)
        if on_result is not None:
            on_result(result)

    def forget(self, workers: Iterable[WorkerId]) -> None:
        """Expect no results of lost workers."""
        lost = frozenset(workers)
        for cell in [cell for cell in self._callbacks if cell[0] in lost]:
            del self._callbacks[cell]

    def _execute(
        self,
        w: WorkerId,
        source: str,
        on_result: Callable[[cell_messages.CellResult], None],
        number: int,
        pushed: messages.Pushed | None = None,
    ) -> None:
        """Run a cell on one worker. `on_result` is called in this thread, unless the worker is lost before."""
        self._callbacks[w, number] = on_result
        self._workers.send((w,), cell_messages.Cell(number, source, pushed, code=self._code_versions.newest))


def _in_order(workers: Iterable[WorkerId], answers: Mapping[WorkerId, CellOutput]) -> list[CellOutput]:
    lost = "the worker died while the cell ran"
    return [answers.get(w, (str(w), "", "", lost)) for w in sorted(workers)]
