"""Carries out the commands that the core has decided on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from nbelastic.core import commands as cmd
from nbelastic.core import script_commands as scmd
from nbelastic.core.state import ClusterState
from nbelastic.driver.agents import Fleet
from nbelastic.driver.event_log import EventLog
from nbelastic.driver.jobs import Jobs
from nbelastic.driver.scripts import Scripts
from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol.ranks import ranges

Change = cmd.FormWorld | cmd.PrepareWorld | cmd.AskLeave | cmd.LeaveAt | cmd.CancelLeave | cmd.AbortWorld


class Executor:
    """Lives in the driver's thread. `record(record, now)` adds to the event log; `log_dir` is the cluster's."""

    def __init__(
        self,
        *,
        cluster: Callable[[], ClusterState],
        fleet: Fleet,
        jobs: Jobs,
        scripts: Scripts,
        chronicle: EventLog,
        record: Callable[[cmd.Record, float], None],
        log_dir: Path,
    ) -> None:
        self._cluster, self._fleet, self._jobs, self._scripts = cluster, fleet, jobs, scripts
        self._chronicle, self._record, self._log_dir = chronicle, record, log_dir
        self._asked_to_leave: cmd.AskLeave | None = None  # while its members do not know where to

    def carry_out(self, command: cmd.Command, now: float) -> None:
        """TypeError for a command that is not known here."""
        to_workers = self._fleet.to_workers
        match command:
            case cmd.StartAgent() | cmd.StopAgent() | cmd.StartWorker() | cmd.StopWorker():
                self._fleet.do(command, self._job_dir())
            case cmd.RunSetup(worker=w, version=version, source=source):
                self._fleet.run_setup(w, version, source)
            case cmd.RunProgram(worker=w, job=job):
                self._jobs.run_program(w, job)
            case (
                cmd.FormWorld()
                | cmd.PrepareWorld()
                | cmd.AskLeave()
                | cmd.LeaveAt()
                | cmd.CancelLeave()
                | cmd.AbortWorld()
            ):
                self._change(command, now)
            case cmd.DropWorld(generation=generation, members=members):
                to_workers(members, worker_messages.DropGroup(generation))
            case cmd.QueryPosition(generation=generation, members=members):
                to_workers(members, worker_messages.QueryPosition(generation))
            case cmd.EndHungWorker(worker=w, keep=keep):
                to_workers((w,), worker_messages.EndHungWorker(keep))
            case cmd.LoadKeptState(worker=w, by=by, commit=commit):
                to_workers((w,), worker_messages.LoadKeptState(by, commit))
            case cmd.DeleteKeptState(by=by):
                self._fleet.to_agent(by.host, agent_messages.DeleteKeptState(by))
            case cmd.StopProgram(job=job, workers=workers, reason=reason, culprit=culprit):
                for w in workers:
                    to_workers((w,), worker_messages.StopProgram(job, reason, own=w == culprit))
            case cmd.EndJob():
                self._jobs.end(command)
            case cmd.Probe() | cmd.Rehome():
                self._fleet.pass_on(command, self._cluster().workers)
                if isinstance(command, cmd.Rehome):
                    self._scripts.rehome(command.host, messages.Rehome(command.address, command.interface))
            case cmd.Record():
                self._record(command, now)
            case scmd.ScriptCommand():
                self._scripts.do(command)
            case _:
                raise TypeError(f"{type(command).__name__} is no command that the driver knows")

    def _change(self, command: Change, now: float) -> None:
        """Tell workers how the world changes, and note how far that is."""
        to_workers = self._fleet.to_workers
        match command:
            case cmd.FormWorld():
                self._chronicle.form(command, now)
                to_workers(command.to or command.members, _formation(command))
            case cmd.PrepareWorld(order=order):
                self._chronicle.prepare(now)
                to_workers(order.members, worker_messages.Prepare(_formation(order)))
            case cmd.AskLeave(generation=generation, members=members, number=number):
                self._asked_to_leave = command
                self._chronicle.begin_change(now, broken=False)
                to_workers(members, worker_messages.Leave(generation, ask=number))
            case cmd.LeaveAt(generation=generation, commit=commit, members=members):
                to_workers(members, worker_messages.Leave(generation, commit))
            case cmd.CancelLeave(generation=generation, members=members):
                to_workers(members, worker_messages.Leave(generation, worker_messages.Leave.STAY))
            case cmd.AbortWorld(generation=generation, members=members, reason=reason):
                self._chronicle.begin_change(now, broken=True)
                to_workers(members, worker_messages.Abort(generation, reason))
        if isinstance(command, cmd.LeaveAt | cmd.CancelLeave | cmd.AbortWorld):
            self._asked_to_leave = None  # now they know

    def let_stay(self, now: float) -> None:
        """Nothing more is decided: members that were asked to leave, and wait at their next commit, stay."""
        if self._asked_to_leave is not None:
            self._change(cmd.CancelLeave(self._asked_to_leave.generation, self._asked_to_leave.members), now)

    def _job_dir(self) -> Path:
        job = self._cluster().active
        return self._log_dir / (job.name if job else "idle")


def _formation(order: cmd.FormWorld) -> worker_messages.Formation:
    """What each of its members is told."""
    by_host = groupby(order.members, key=lambda w: w.host)
    hosts = tuple((host, tuple(w.slot for w in workers)) for host, workers in by_host)
    return worker_messages.Formation(order.generation, hosts, order.store, order.root, ranges(order.receivers))
