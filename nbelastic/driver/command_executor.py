"""Carries out the commands that the core has decided on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from nbelastic.core import commands as cmd
from nbelastic.core import script_commands as scmd
from nbelastic.core.state import ClusterState
from nbelastic.driver.agents import Agents
from nbelastic.driver.cells import Cells
from nbelastic.driver.event_log import EventLog
from nbelastic.driver.jobs import Jobs
from nbelastic.driver.scripts import Scripts
from nbelastic.driver.workers import Workers
from nbelastic.protocol import agent_messages, cell_messages, messages, worker_messages
from nbelastic.protocol.rank_layout import ranges

GenerationCommand = (
    cmd.FormWorld | cmd.PrepareWorld | cmd.AskLeave | cmd.LeaveAt | cmd.HaltAt | cmd.CancelLeave | cmd.AbortWorld
)


class CommandExecutor:
    """Lives in the driver's thread. `record(record, now)` adds to the event log; `log_dir` is the cluster's log folder."""

    def __init__(
        self,
        *,
        cluster: Callable[[], ClusterState],
        agents: Agents,
        workers: Workers,
        cells: Cells,
        jobs: Jobs,
        scripts: Scripts,
        event_log: EventLog,
        record: Callable[[cmd.Record, float], None],
        log_dir: Path,
    ) -> None:
        self._cluster, self._agents, self._workers, self._cells = cluster, agents, workers, cells
        self._jobs, self._scripts = jobs, scripts
        self._event_log, self._record, self._log_dir = event_log, record, log_dir
        self._open_question: cmd.AskLeave | None = None  # asked of members that do not know the leave point yet

    def execute(self, command: cmd.Command, now: float) -> None:
        """Carry out a command. TypeError for an unknown one."""
        send = self._workers.send
        match command:
            case cmd.StartAgent() | cmd.StopAgent() | cmd.CancelEnd() | cmd.StartWorker() | cmd.StopWorker():
                self._agents.execute(command, self._job_log_dir())
            case cmd.RunSetup():
                self._cells.run_setup(command)
            case cmd.RunCommitCell():
                self._cells.run_at_commit(command, self._cluster().members)
            case cmd.InterruptCell(number=number, workers=workers):
                send(workers, cell_messages.InterruptCell(number))
            case cmd.RunProgram(worker=w, job=job):
                self._jobs.run_program(w, job)
            case cmd.TryProgram():
                self._jobs.try_program(command)
            case cmd.KeepProgram():
                self._jobs.keep_program(command)
            case (
                cmd.FormWorld()
                | cmd.PrepareWorld()
                | cmd.AskLeave()
                | cmd.LeaveAt()
                | cmd.HaltAt()
                | cmd.CancelLeave()
                | cmd.AbortWorld()
            ):
                self._change_generation(command, now)
            case cmd.DropWorld(generation=generation, members=members):
                send(members, worker_messages.DropGroup(generation))
            case cmd.QueryPosition(generation=generation, members=members):
                send(members, worker_messages.QueryPosition(generation))
            case cmd.EndHungWorker(worker=w, keep=keep):
                send((w,), worker_messages.EndHungWorker(keep))
            case cmd.LoadKeptState(worker=w, by=by, commit=commit):
                send((w,), worker_messages.LoadKeptState(by, commit))
            case cmd.DeleteKeptState(by=by):
                self._agents.send(by.host, agent_messages.DeleteKeptState(by))
            case cmd.StopProgram(job=job, workers=workers, reason=reason, culprit=culprit, writer=writer):
                for w in workers:
                    writes = None if writer is None else w == writer
                    send((w,), worker_messages.StopProgram(job, reason, w == culprit, writes))
            case cmd.EndJob():
                self._jobs.end(command)
            case cmd.Probe(host=host):
                probe = agent_messages.Probe(command.target, command.addresses, command.port, command.number)
                self._agents.send(host, probe)
            case cmd.Rehome():
                self._rehome(command)
            case cmd.Record():
                self._record(command, now)
            case scmd.ScriptCommand():
                self._scripts.execute(command)
            case _:
                raise TypeError(f"the driver cannot carry out the command {type(command).__name__}")

    def _rehome(self, command: cmd.Rehome) -> None:
        """Tell a host's agent, workers and node that they have a new address."""
        rehome = messages.Rehome(command.address, command.interface)
        self._agents.rehome(command.host, rehome)
        self._workers.send([w for w in self._cluster().workers if w.host == command.host], rehome)
        self._scripts.rehome(command.host, rehome)

    def _change_generation(self, command: GenerationCommand, now: float) -> None:
        """Tell workers how their generation begins or ends, and measure how long that takes."""
        send = self._workers.send
        match command:
            case cmd.FormWorld():
                root = self._cluster().workers.get(command.members[command.root])
                self._event_log.note_formation(command, now, root.commit if root is not None else 0)
                send(command.to or command.members, self._formation(command))
            case cmd.PrepareWorld(formation=formation):
                self._event_log.note_preparation(now)
                send(formation.members, worker_messages.Prepare(self._formation(formation)))
            case cmd.AskLeave(generation=generation, members=members, number=number):
                self._open_question = command
                self._event_log.note_leave(now, broken=False)
                send(members, worker_messages.Leave(generation, ask=number))
            case cmd.LeaveAt(generation=generation, commit=commit, members=members, removed=removed):
                send(members, worker_messages.Leave(generation, commit, removed=removed))
            case cmd.HaltAt(generation=generation, commit=commit, members=members):
                send(members, worker_messages.Halt(generation, commit))
            case cmd.CancelLeave(generation=generation, members=members):
                send(members, worker_messages.Leave(generation, worker_messages.Leave.STAY))
            case cmd.AbortWorld(generation=generation, members=members, reason=reason):
                self._event_log.note_leave(now, broken=True)
                send(members, worker_messages.Abort(generation, reason))
        if isinstance(command, cmd.LeaveAt | cmd.HaltAt | cmd.CancelLeave | cmd.AbortWorld):
            self._open_question = None

    def _formation(self, command: cmd.FormWorld) -> worker_messages.Formation:
        """The message to each member."""
        job, by_host = self._cluster().job, groupby(command.members, key=lambda w: w.host)
        hosts = tuple((host, tuple(w.slot for w in workers)) for host, workers in by_host)
        backend, receivers = job.backend if job is not None else "", ranges(command.receivers)
        return worker_messages.Formation(
            command.generation, hosts, command.store, command.root, receivers, backend or "gloo"
        )

    def cancel_open_leave(self, now: float) -> None:
        """Let members stay that were asked to leave: they would wait at their next commit for a decision."""
        if self._open_question is not None:
            question = self._open_question
            self._change_generation(cmd.CancelLeave(question.generation, question.members), now)

    def _job_log_dir(self) -> Path:
        job = self._cluster().active
        return self._log_dir / (job.name if job else "idle")
