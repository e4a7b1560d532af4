"""What a worker does in the thread of its link: it carries out the driver's messages, aborts groups and sends reports.

This thread never touches the training state. What concerns the main thread goes into its inbox.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from nbelastic.protocol import cell_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.exit_codes import HUNG
from nbelastic.protocol.ids import WorkerId
from nbelastic.system import pickling
from nbelastic.system.fault_handling import guarded
from nbelastic.system.folder_paths import kept_state_folder
from nbelastic.transport.client import Client
from nbelastic.worker import protocol
from nbelastic.worker.accelerator import accelerator_for
from nbelastic.worker.cell_pieces import CellPieces
from nbelastic.worker.environment import set_interface
from nbelastic.worker.formation import Formation
from nbelastic.worker.groups import Groups
from nbelastic.worker.hang_detector import HangResponse
from nbelastic.worker.inbox import Inbox
from nbelastic.worker.output_buffer import OutputBuffer
from nbelastic.worker.process_group import world_collectives
from nbelastic.worker.step_times import PERIOD, StepTimes
from nbelastic.worker.telemetry import REPORT_PERIOD
from nbelastic.worker.threads import run_in_thread
from nbelastic.worker.user_stack import current_line, stack_dump

MAX_TICK_DELAY = 2.0  # seconds; a tick that is later shows that this process was stopped
ERROR_PERIOD = 1.0  # seconds between two looks for an error of a collective
ABORT_PERIOD = 0.02  # seconds between two aborts of the same group
MAX_PREPARE_ERROR = 200  # characters of the error in a WorkerPrepared
OFFER_AT = 2  # commits of a generation after which the next generation's store is offered
HUNG_TEXT = b"nbelastic: stuck in an aborted collective; this worker ends and is replaced\n"


class CommitCells(Protocol):
    """Runs cells at commits."""

    def run(self, cell: cell_messages.CommitCell) -> cell_messages.CellResult:
        """Run the cell in the main thread."""

    def accept(self) -> None:
        """All ranks go on after the last cell: what it has changed belongs to the commit."""

    def interrupt(self, number: int) -> None:
        """In any thread: interrupt this cell, if it runs."""


class StateHolder(Protocol):
    """The part of this process that has the training state: the elastic loop."""

    @property
    def commit_cells(self) -> CommitCells:
        """What runs cells at commits."""

    @property
    def position(self) -> tuple[int, bool]:
        """The newest commit, and whether the live tensors are those of that commit."""

    def program_kept(self) -> None:
        """The driver has accepted the new program that this loop runs."""

    def committed(self) -> None:
        """The state has made a commit, in the main thread."""

    def hand_over(self, leaving: tuple[int, ...]) -> None:
        """Collective, at a commit: the ranks `leaving` end, and send what only they hold to others."""

    def finish_copies(self) -> None:
        """Wait until the copies of the newest commit that is being copied are complete."""

    def write_last_checkpoint(self) -> None:
        """Write the job's last checkpoint, if it has any, while the main thread hangs."""

    def write_kept_state(self, folder: Path) -> int:
        """Write the newest commit into `folder` while the main thread hangs; returns its number. Raises OSError."""

    def load_kept_state(self, folder: Path, commit: int) -> None:
        """Load the state that another worker wrote there. StateError if it is not this commit, or not complete."""


class LinkThread:
    """Each method runs in the link thread, which is the only one that sets the attributes, unless a comment says otherwise."""

    def __init__(
        self,
        settings: dict[str, Any],
        machine: protocol.Protocol,
        inbox: Inbox,
        groups: Groups,
        output: OutputBuffer,
        *,
        cell_pieces: CellPieces,
    ) -> None:
        self._worker = WorkerId.parse(settings["worker"])
        self._protocol = machine
        self._inbox = inbox
        self._groups = groups
        self._output, self._cell_pieces = output, cell_pieces
        self._relay = Path(settings["relay"])  # of this host's agent
        self._heartbeat = float(settings["heartbeat"])
        self.link = Client(
            self._relay,
            None,
            f"worker/{self._worker}",
            worker_messages.ToWorker,
            self.receive,
            tick=self.tick,
            heartbeat=self._heartbeat,
        )
        self.hang = HangResponse(self._worker, self.link.send, self._end_hung, self._discard_kept)
        # The main thread sets the next five.
        self.holder: StateHolder | None = None  # while an elastic function runs
        self.run: Callable[[messages.Message], object] | None = None  # takes programs and cells
        self.result_value = b""  # of the newest program, for a driver that fetches it
        self.state_value = "", b""  # a packed training state and its key, for a driver that fetches it
        self.collectives_before = 0  # collectives of this generation that began before the training did
        self._step_times = StepTimes()
        self._ticked_at = 0.0
        self._error_at = 0.0  # when to look for an error of a collective again
        self._resumed_at = 0.0  # when this process ran again after it was stopped: it has yet to read what was sent

    def receive(self, message: messages.Message) -> None:
        with self._inbox.lock:
            actions = self._post(self._protocol.receive(message))
        self._carry_out(actions)

    def _post(self, actions: list[protocol.Action]) -> list[protocol.Action]:
        """Pass messages to the main thread under the lock that guards its promises; returns the other actions."""
        rest = []
        for action in actions:
            match action:
                case protocol.Post(news=news):
                    self._inbox.post(news)
                case protocol.Perform(message=messages.Rehome() as order):  # before the main thread offers a store
                    self._change_address(order)
                case _:
                    rest.append(action)
        return rest

    def _carry_out(self, actions: Iterable[protocol.Action]) -> None:
        for action in actions:
            guarded(self._carry_out_one, action)  # a fault in one loses none of the others: one may send the result

    def _carry_out_one(self, action: protocol.Action) -> None:
        match action:
            case protocol.Send(message=message, newest=newest):
                (self.link.report if newest else self.link.send)(message)
            case protocol.Introduce():
                self.link.reset_session(self._introduction)
            case protocol.Perform(message=message):
                self._perform(message)
            case protocol.PrepareGroup(formation=formation):
                self._prepare(formation)
            case protocol.SendOutput(later=later):
                self._output.hold() if later else self._send_output()
            case protocol.AbortGroup():
                self._groups.abort_for_all()
            case protocol.EndProcess():
                os._exit(0)

    def _perform(self, message: messages.Message) -> None:
        match message:
            case (
                worker_messages.Program()
                | cell_messages.Cell()
                | worker_messages.CallPiece()
                | worker_messages.NewProgram()
                | worker_messages.KeepProgram()
                | worker_messages.DebuggerInput()
                | worker_messages.ConnectEngine()
            ):
                if self.run is not None:  # else this worker has not announced that it can run programs
                    self.run(message)
            case worker_messages.FetchResult(job=job, offset=offset):
                self._send_value(job, offset)
            case worker_messages.QueryPosition(generation=generation):
                self._report_position(generation)
            case worker_messages.ShowStack(number=number):
                self.link.send(worker_messages.StackShown(self._worker, number, current_line(), stack_dump()))
            case worker_messages.EndHungWorker(keep=keep):
                holder, folder = self.holder, kept_state_folder(self._relay, self._worker)
                task = partial(holder.write_kept_state, folder) if keep and holder is not None else None
                self.hang.answer(task, self._protocol.job, time.monotonic())
            case cell_messages.InterruptCell(number=number):
                holder = self.holder  # read once: the main thread may remove it
                if holder is not None:
                    holder.commit_cells.interrupt(number)
                if self.run is not None:
                    self.run(message)
            case worker_messages.AllowPeers(addresses=addresses):
                self._groups.next.expect(addresses)

    def _introduction(self) -> worker_messages.WorkerReport:
        """The report to a new driver, which has received none of the earlier messages."""
        self._output.hold()
        offer = self._groups.next.offer
        return self._protocol.report(os.getpid(), offer.endpoint if offer is not None else "")

    def _change_address(self, order: messages.Rehome) -> None:
        """Make the next generation's connections from another address; the present generation keeps its connections."""
        set_interface(order.interface)
        self._groups.next.change_address(order.address)
        if self._protocol.commits >= OFFER_AT:
            self.offer_store()

    def offer_store(self) -> None:
        """Offer a store for the generation after this one, beside the training. In any thread."""
        group = self._groups.present
        if group is not None:
            generation = group.generation
            self._groups.next.make_offer(
                group.peers, lambda store: self.link.send(ev.StoreOffered(self._worker, generation, store))
            )

    def _report_position(self, generation: int) -> None:
        group, formation = self._groups.present, self._protocol.formation
        if group is None or group.generation > generation:  # a newer generation may be broken already
            return
        used = time.process_time() - time.thread_time()  # by all threads but this one, which repeats aborts
        connected = formation is not None and formation.generation == generation
        with contextlib.suppress(RuntimeError):  # a group is being made: the driver will ask again
            begun = world_collectives() - self.collectives_before
            total = self._protocol.total
            self.link.send(ev.PositionReported(self._worker, generation, total, begun, current_line(), used, connected))

    def _prepare(self, formation: Formation) -> None:
        def done(failure: Exception | None) -> None:
            error = "" if failure is None else f"{type(failure).__name__}: {failure}"[:MAX_PREPARE_ERROR]
            self.link.send(ev.WorkerPrepared(self._worker, formation.generation, error))

        self._groups.next.prepare(formation, accelerator_for(formation.backend), done)

    def tick(self) -> float:
        """Do what is due; returns the seconds until the next tick."""
        now, link = time.monotonic(), self.link
        if now - self._ticked_at > self._heartbeat + MAX_TICK_DELAY:
            self._resumed_at = now
        self._ticked_at = now
        received_at = max(link.heard_at, self._resumed_at)
        with self._inbox.lock:
            state = protocol.LinkState(link.disconnected, link.congested, received_at)
            actions = self._post(self._protocol.tick(now, state))
        self._carry_out(actions)
        delay = self._abort(now)
        if self._groups.uses_gpu or not self._protocol.is_timing_steps:
            return delay
        self._protocol.telemetry.own = self._step_times.take  # each program has a Telemetry of its own
        self._step_times.sample()
        return min(delay, PERIOD)

    def _abort(self, now: float) -> float:
        """Abort groups of generations that are over, again and again; returns the seconds until the next time."""
        stopped = self._protocol.quit is not None
        if self.hang.is_keeping:
            if stopped and not self.hang.has_moved(now):
                self._end_hung()
            if not self.link.disconnected or self.hang.has_moved(now):
                self.hang.continue_keeping(now)
            return ABORT_PERIOD
        next_is_done, group = self._groups.abort_next(), self._groups.overdue(now)
        if group is None:
            self.hang.reset()
            self._report_error(now)
            return REPORT_PERIOD if next_is_done else ABORT_PERIOD
        group.abort()
        if self.hang.watch(group.generation, now, with_gpu=self._groups.uses_gpu):
            if self._protocol.quit is not None or not self._protocol.facts.holds_state:
                self._end_hung()
            if not self.link.disconnected:
                self.hang.ask(self._protocol.total, now)
        return ABORT_PERIOD

    def _report_error(self, now: float) -> None:
        """Report a collective that failed without raising, as NCCL's do: the main thread may wait for it without an end."""
        group = self._groups.present
        if group is None or now < self._error_at:
            return
        self._error_at = now + ERROR_PERIOD
        error = group.error
        if error:
            self.link.send(ev.WorkerRaised(self._worker, group.generation, intact=False, error=error))

    def _discard_kept(self) -> None:
        run_in_thread(partial(shutil.rmtree, kept_state_folder(self._relay, self._worker), ignore_errors=True))

    def _end_hung(self) -> NoReturn:
        """End this process. If the job is stopped, no other rank writes the last checkpoint in the place of this one."""
        os.write(2, HUNG_TEXT)
        try:
            if self._protocol.quit is not None and self.holder is not None:
                self.holder.write_last_checkpoint()
        finally:
            os._exit(HUNG)

    def _send_output(self) -> None:
        for job, rank, stream, text, end in self._output.take():
            self.link.send(messages.WorkerOutput(self._worker, stream, text, end, job, rank))
        for piece in self._cell_pieces.take():
            self.link.send(piece)

    def _send_value(self, job: str, offset: int) -> None:
        result, value = self._protocol.facts.result, self.result_value
        key, state = self.state_value
        if key == job:
            value = state
            if offset + pickling.PIECES * pickling.PIECE >= len(state):
                self.state_value = "", b""
        elif result is None or result.job != job:
            return
        for at, data in pickling.pieces(value, offset):
            self.link.send(worker_messages.ResultPiece(self._worker, job, at, data))
