"""A worker's session with the driver, as its main thread uses it: programs, generations and commits.

The link thread (`link_thread.py`) receives the driver's messages. The main thread reads those that concern it at commits
and between generations.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nbelastic.errors import JobStoppedError, NoWorldError
from nbelastic.protocol import cell_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.rank_reports import ReplicaHashes
from nbelastic.system.folder_paths import kept_state_folder
from nbelastic.worker import protocol
from nbelastic.worker.accelerator import accelerator_for
from nbelastic.worker.cell_pieces import CellPieces
from nbelastic.worker.error_text import text_of
from nbelastic.worker.formation import Formation
from nbelastic.worker.groups import Groups
from nbelastic.worker.hang_detector import REPEAT
from nbelastic.worker.inbox import Inbox
from nbelastic.worker.interrupts import WorldAborted, WorldLeft
from nbelastic.worker.job_checkpoints import JobCheckpoints
from nbelastic.worker.link_thread import OFFER_AT, LinkThread, StateHolder
from nbelastic.worker.output_buffer import OutputBuffer
from nbelastic.worker.own_errors import is_of_program
from nbelastic.worker.process_group import Offer, world_collectives
from nbelastic.worker.programs import Programs
from nbelastic.worker.warm_up import WarmUp
from nbelastic.worker.worker_report import WorkerFacts

T = TypeVar("T")

STOP_TIMEOUT = 0.25  # seconds after an abort within which the driver says whether the job ends with this error


class Session:
    """One per process. Its methods are for the main thread."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.worker = WorkerId.parse(settings["worker"])
        self.output = OutputBuffer()
        self.cell_pieces = CellPieces(self.worker)
        self.warm_up = WarmUp(nccl=settings.get("backend") != "gloo")
        self.used = False  # an elastic function has run in this program
        self.warm_ups: list[Callable[[Any], object]] = []  # of this job's program, not called yet
        self.checkpoints: JobCheckpoints | None = None  # of this job
        self.ended_state: Any = None  # the training state after the end of this job's elastic function
        self._refused: str = settings.get("refused", "")  # which modules the template has refused, and why
        self.relay = Path(settings["relay"])  # the folder of this host's agent
        self._protocol = protocol.Protocol(self.worker, float(settings["lease"]))
        self._inbox = Inbox()
        self._groups = Groups(settings["address"], self._protocol.is_over)
        self._link_thread = LinkThread(
            settings, self._protocol, self._inbox, self._groups, self.output, cell_pieces=self.cell_pieces
        )
        self.link = self._link_thread.link
        self.programs = Programs(self._protocol, self._inbox, self.link.send)
        self._formation_read: Formation | None = None  # of the generation after this one, read at a commit
        self._formed_at = 0.0

    @property
    def groups(self) -> Groups:
        """The process groups of this worker."""
        return self._groups

    @property
    def holder(self) -> StateHolder | None:
        """The elastic loop, while one runs."""
        return self._link_thread.holder

    @holder.setter
    def holder(self, holder: StateHolder | None) -> None:
        self._link_thread.holder = holder

    @property
    def facts(self) -> WorkerFacts:
        """The contents of a report to a new driver."""
        return self._protocol.facts

    @property
    def formation(self) -> Formation | None:
        """The world that this worker is in, if its group is formed."""
        return self._protocol.formation

    @property
    def last_turn(self) -> int | None:
        """When this worker writes the job's last checkpoint: see `Protocol.last_turn`."""
        return self._protocol.last_turn(disconnected=self.link.disconnected)

    @property
    def is_rank_0(self) -> bool:
        """Whether this rank prints, reports and saves for all ranks."""
        return self._protocol.is_rank_0

    def hello(self, run: Callable[[messages.Message], object]) -> None:
        """Tell the driver that this worker can run programs and cells; the link thread calls `run(message)` for each."""
        self._link_thread.run = run
        self.facts.is_ready = True
        self.link.send(worker_messages.WorkerHello(self.worker, os.getpid(), self._refused))

    def begin(self, job: str, program: int = 0) -> None:
        """Begin a program: drop what belongs to the last one. JobStoppedError if the job is over already."""
        self.warm_up.wait()
        self.leave_group()
        self._groups.end_last()
        self._groups.accelerator = None  # until the first formation names the back end
        self._groups.next.abort()
        self.output.job, self.output.rank = job, None
        with self._inbox.lock:
            self._formation_read = None
            self._inbox.clear()
            self._protocol.begin(job, program)
        self._protocol.telemetry.checkpoint = self._report_checkpoint
        self.used, self.warm_ups = False, []
        self.checkpoints = self.ended_state = None
        self.refuse_if_stopped(job)

    def refuse_if_stopped(self, job: str) -> None:
        """JobStoppedError if this job is over, also if its program has not begun here."""
        reason = self._protocol.stopped(job)
        if reason is not None:
            raise JobStoppedError(reason)

    def finish(self) -> None:
        """The program has ended. Keep a healthy group: other ranks may still read what this one sent last."""
        if self._protocol.quit is not None:
            self.leave_group()

    def program_begins(self, job: str) -> None:
        """A new program, which may have to be fetched first. Drop the result of the last one."""
        self._link_thread.result_value = b""
        self.facts.begin(job)

    def keep_state_value(self, key: str, value: bytes) -> None:
        """Keep a packed state until the driver has fetched it."""
        self._link_thread.state_value = key, value

    def program_ended(self, result: worker_messages.ProgramResult, value: bytes) -> None:
        """Send the result with the next tick, after the program's output. The driver fetches `value`."""
        self._link_thread.result_value = value
        self._protocol.program_ended(result)
        self.link.wake()

    def cell_ended(self, result: cell_messages.CellResult) -> None:
        """Send the result of a cell, after what the cell has printed."""
        self.cell_pieces.end(result)
        self.link.wake()

    def repeat_result(self) -> None:
        """Send the newest program's result again, if it has ended."""
        self._protocol.repeat_result()
        self.link.wake()

    def gather(self, holder: StateHolder) -> tuple[Formation, Offer]:
        """Report that this worker is ready, and wait for its next world. JobStoppedError if the job ends."""
        offers = self._groups.next
        if offers.offer is None:
            self.leave_group()  # first: an abort ends every connection that is opened while a group forms
        self._protocol.leave()
        offer = offers.take_offer()
        news, sent = None, None
        while True:
            if self._protocol.quit is not None:
                raise JobStoppedError(self._protocol.quit.reason)
            commit, clean = holder.position
            ready = self._protocol.ready(commit, clean=clean, store=offer.endpoint)
            if ready != sent or not isinstance(news, worker_messages.Abort):  # of the world that it has left already
                self.link.send(ready)
                sent = ready
            self.leave_group()  # while the message is on its way
            read, self._formation_read = self._formation_read, None
            news = read or self._receive(REPEAT)
            with self._inbox.lock:
                formation = self._protocol.enter(news)
            if formation is not None:
                self._link_thread.hang.enter(formation.generation)
                return formation, offer
            match news:
                case messages.Rehome():  # no member could connect to the old store
                    offer = offers.take_offer()
                case worker_messages.NewProgram():
                    self._handle(news)
                case worker_messages.LoadKeptState(by=by, commit=commit):
                    holder.load_kept_state(kept_state_folder(self.relay, by), commit)
                    self._protocol.total, self.facts.holds_state = commit, True

    def join(self, formation: Formation, offer: Offer) -> None:
        """Form the generation's process group. Raises what torch raises, or WorldAborted."""
        self._groups.accelerator = accelerator_for(formation.backend)
        self._groups.open(formation.generation)
        self._protocol.generation = formation.generation
        if self._protocol.is_over(formation.generation):
            raise WorldAborted
        self._groups.form(formation, offer)
        self._protocol.joined(formation)
        self.output.rank = formation.rank

    def run_abortable(self, task: Callable[[], T]) -> T:
        """Run `task` in a thread that an abort may abandon: see `Groups.run_abortable`."""
        return self._groups.run_abortable(task)

    def side_group(self, name: str) -> Any:
        """Collective: a gloo group of all ranks, beside torch's. An abort of the generation reaches it."""
        group, formation = self._groups.present, self.formation
        assert group is not None
        assert formation is not None
        return self.run_abortable(lambda: group.side_group(name, formation.rank, formation.world_size))

    def formed(self, phases: dict[str, float]) -> None:
        """Report that the group is formed and has the training state. `phases`: name -> milliseconds."""
        self._formed_at = time.monotonic()
        self._link_thread.collectives_before = world_collectives()  # ranks that moved the state have begun more
        self.link.send(self._protocol.formed(phases))

    def succeed(self, event: ev.WorkerSucceeded) -> None:
        """Report that the elastic function has returned."""
        self.facts.last_event = event
        self.link.send(event)

    def committed(self, total: int) -> None:
        """Count a commit; leave here if that was agreed. While there are no messages, this only counts."""
        machine = self._protocol
        if self.holder is not None:
            self.holder.committed()
        with self._inbox.lock:
            machine.commits += 1
        machine.total = total
        if machine.commits == 1:
            now = time.monotonic()
            machine.telemetry.begin((now - self._formed_at) * 1000, now)
            self.link.wake()
        elif machine.commits == OFFER_AT:
            self._groups.end_last()
            self._link_thread.offer_store()
        if self._inbox.attention:
            self._read_messages()

    def report(self, values: dict[str, float]) -> None:
        """Send the newest values a few times per second. A value that is not finite is sent at once."""
        if self._protocol.telemetry.put(values):
            self.link.wake()

    def report_copies(self, source: Callable[[float], worker_messages.Copies] | None) -> None:
        """Call `source(now)` in the link thread for what each progress message has about copies; None: nothing."""
        self._protocol.telemetry.copies = source

    def report_hashes(self, source: Callable[[], ReplicaHashes | None]) -> None:
        """Call `source()` in the link thread for the hashes of commits that each progress message has."""
        self._protocol.telemetry.replica = source

    def _report_checkpoint(self, now: float) -> worker_messages.Checkpoint | None:
        plan = self.checkpoints
        return plan.report(now) if plan is not None else None

    def _read_messages(self) -> None:
        """Read all messages; wait at a commit that this worker promised not to pass; leave at the leave point."""
        machine, announced = self._protocol, False
        while True:
            waiting = machine.pause_at is not None and machine.commits >= machine.pause_at
            if waiting and machine.stands_still and not announced:
                announced = True
                self.finish_gpu_work()
                self.link.send(ev.WorkerHalted(self.worker, machine.generation, machine.commits))
            news = self._receive(REPEAT) if waiting else self._inbox.take()
            if news is None and not waiting:
                break
            self._handle(news)
            announced = announced and not isinstance(news, worker_messages.Halt)  # it may have come too late to count
        if machine.leave_at is not None and machine.commits >= machine.leave_at:
            self.finish_gpu_work()
            if self.holder is not None:
                self.holder.hand_over(machine.removed)
            raise WorldLeft
        with self._inbox.lock:
            self._inbox.attention = machine.has_promised or not self._inbox.is_empty()

    def _handle(self, news: protocol.News | None) -> None:
        holder, cells = self.holder, None if self.holder is None else self.holder.commit_cells
        match news:
            case Formation():
                self._formation_read = news
            case worker_messages.Abort() | worker_messages.DropGroup() if self._protocol.is_over(
                self._protocol.generation
            ):
                raise WorldAborted
            case cell_messages.CommitCell(generation=generation) if cells and generation == self._protocol.generation:
                cells.accept()
                self.cell_ended(cells.run(news))
            case worker_messages.NewProgram(program=program) if holder and program.number != self._protocol.program:
                holder.commit_cells.accept()
                self.programs.ordered = news
                holder.finish_copies()
                raise WorldLeft
            case worker_messages.KeepProgram(number=number) if holder and self.programs.keeps(number):
                holder.program_kept()
            case worker_messages.Leave(commit=worker_messages.Leave.STAY) | worker_messages.Halt() if cells:
                cells.accept()

    def check(self, where: torch.device) -> None:
        """WorldAborted if the generation is broken. Wait for the GPU first: an aborted kernel ends as if it had succeeded."""
        if where.type == "cuda" or self._groups.accelerator is not None:
            self._groups.synchronize()
        self.raise_if_over()

    def raise_if_over(self) -> None:
        """WorldAborted if the generation is broken."""
        group = self._groups.present
        if group is not None and self._protocol.is_over(group.generation):
            raise WorldAborted

    def finish_gpu_work(self) -> None:
        """Wait for the work that this worker has begun on its GPU: a commit includes it, and closing the group would cut it.

        WorldAborted if the generation is broken: a collective that was aborted there ends as if it had succeeded.
        """
        if self._groups.uses_gpu:
            self._groups.synchronize(all_streams=True)
            self.raise_if_over()

    def on_any_rank(self, mine: bool, group: Any = None) -> bool:
        """Collective: whether `mine` is true on any rank, of this group or of all."""
        if self.formation is None or self.formation.world_size == 1:
            return mine
        kinds = [kind.type for kind in (group or dist.group.WORLD)._device_types]
        found = torch.tensor([mine], dtype=torch.uint8, device="cpu" if "cpu" in kinds else kinds[0])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        self.check(found.device)
        return bool(found)

    def is_own_error(self, error: BaseException) -> bool:
        """The user's function raised `error`: ask the driver whether the program caused it, and not a lost worker."""
        group = self._groups.present
        assert group is not None
        machine, generation = self._protocol, group.generation
        own = is_of_program(error, self._groups)
        raised = machine.raised(f"{type(error).__name__}: {text_of(error)}", intact=own)
        while not machine.is_over(generation):
            self.link.send(raised)
            match self._receive(REPEAT):
                case worker_messages.Abort() | worker_messages.DropGroup() if machine.is_over(generation):
                    return own and isinstance(self._receive(STOP_TIMEOUT), worker_messages.StopProgram)
                case worker_messages.StopProgram():  # of this program's own error: other ranks raised it too
                    return True
        return machine.quit is not None and machine.quit.own

    def leave_group(self, *, abort: bool = False) -> None:
        """Close the generation's group, if there is one. `abort`: some ranks may never take part in what others have begun."""
        self._protocol.leave()
        self._groups.close(abort=abort)

    def _receive(self, timeout: float) -> protocol.News | None:
        """The next message. JobStoppedError if the job ends for another reason than this program's error; ProgramRejected."""
        while isinstance(news := self._inbox.take(timeout), worker_messages.KeepProgram):
            self._handle(news)
        if isinstance(news, worker_messages.StopProgram) and not news.own:
            raise JobStoppedError(news.reason)
        return news


_session: Session | None = None


def start(session: Session) -> None:
    """Make `session` the session of this process, and start its link."""
    global _session
    _session = session
    session.link.start()
    session.link.send(
        worker_messages.WorkerProgress(session.worker, 0, 0, {})
    )  # the driver expects messages from now on


def current() -> Session:
    """The session of this process. NoWorldError outside nbelastic's workers."""
    if _session is None:
        raise NoWorldError("this does not run in an nbelastic worker: use it inside %%elastic_run or Cluster.run().")
    return _session


def world() -> Formation:
    """The formation that this worker is in. NoWorldError outside an elastic function."""
    with contextlib.suppress(NoWorldError):
        formation = current().formation
        if formation is not None:
            return formation
    raise NoWorldError(
        "there is no world here: rank(), size() and the like work inside a function decorated with @nbe.elastic."
    )
