"""Carries out the commands that the core has decided on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from nbelastic.core import messages as m
from nbelastic.core import script_messages as s
from nbelastic.core import wire
from nbelastic.core.placement import ranges
from nbelastic.core.world import World
from nbelastic.driver.chronicle import Chronicle
from nbelastic.driver.fleet import Fleet
from nbelastic.driver.jobs import Jobs
from nbelastic.driver.scripts import Scripts

Change = m.FormWorld | m.PrepareWorld | m.AskLeave | m.LeaveAt | m.Stay | m.AbortWorld


class Executor:
    """Lives in the driver's thread. `record(record, now)` adds to the event log; `log_dir` is the cluster's."""

    def __init__(
        self,
        *,
        world: Callable[[], World],
        fleet: Fleet,
        jobs: Jobs,
        scripts: Scripts,
        chronicle: Chronicle,
        record: Callable[[m.Record, float], None],
        log_dir: Path,
    ) -> None:
        self._world, self._fleet, self._jobs, self._scripts = world, fleet, jobs, scripts
        self._chronicle, self._record, self._log_dir = chronicle, record, log_dir
        self._asked_to_leave: m.AskLeave | None = None  # while its members do not know where to

    def carry_out(self, command: m.Command, now: float) -> None:
        """TypeError for a command that is not known here."""
        to_workers = self._fleet.to_workers
        match command:
            case m.StartAgent() | m.StopAgent() | m.StartWorker() | m.StopWorker():
                self._fleet.do(command, self._job_dir())
            case m.RunSetup(worker=w, version=version, source=source):
                self._fleet.run_setup(w, version, source)
            case m.RunProgram(worker=w, job=job):
                self._jobs.run_program(w, job)
            case m.FormWorld() | m.PrepareWorld() | m.AskLeave() | m.LeaveAt() | m.Stay() | m.AbortWorld():
                self._change(command, now)
            case m.DropWorld(epoch=epoch, members=members):
                to_workers(members, wire.Drop(epoch))
            case m.Look(epoch=epoch, members=members):
                to_workers(members, wire.Look(epoch))
            case m.EndStuck(worker=w, keep=keep):
                to_workers((w,), wire.EndStuck(keep))
            case m.TakeKept(worker=w, by=by, commit=commit):
                to_workers((w,), wire.TakeKept(by, commit))
            case m.ForgetKept(by=by):
                self._fleet.to_agent(by.host, wire.ForgetKept(by))
            case m.StopProgram(job=job, workers=workers, reason=reason, culprit=culprit):
                for w in workers:
                    to_workers((w,), wire.Quit(job, reason, own=w == culprit))
            case m.EndJob():
                self._jobs.end(command)
            case m.Probe() | m.Rehome():
                self._fleet.pass_on(command, self._world().workers)
                if isinstance(command, m.Rehome):
                    self._scripts.rehome(command.host, wire.Rehome(command.address, command.interface))
            case m.Record():
                self._record(command, now)
            case s.ScriptCommand():
                self._scripts.do(command)
            case _:
                raise TypeError(f"{type(command).__name__} is no command that the driver knows")

    def _change(self, command: Change, now: float) -> None:
        """Tell workers how the world changes, and note how far that is."""
        to_workers = self._fleet.to_workers
        match command:
            case m.FormWorld():
                self._chronicle.form(command, now)
                to_workers(command.to or command.members, _formation(command))
            case m.PrepareWorld(order=order):
                self._chronicle.prepare(now)
                to_workers(order.members, wire.Prepare(_formation(order)))
            case m.AskLeave(epoch=epoch, members=members, number=number):
                self._asked_to_leave = command
                self._chronicle.begin_change(now, broken=False)
                to_workers(members, wire.Leave(epoch, ask=number))
            case m.LeaveAt(epoch=epoch, commit=commit, members=members):
                to_workers(members, wire.Leave(epoch, commit))
            case m.Stay(epoch=epoch, members=members):
                to_workers(members, wire.Leave(epoch, wire.Leave.STAY))
            case m.AbortWorld(epoch=epoch, members=members, reason=reason):
                self._chronicle.begin_change(now, broken=True)
                to_workers(members, wire.Abort(epoch, reason))
        if isinstance(command, m.LeaveAt | m.Stay | m.AbortWorld):
            self._asked_to_leave = None  # now they know

    def let_stay(self, now: float) -> None:
        """Nothing more is decided: members that were asked to leave, and wait at their next commit, stay."""
        if self._asked_to_leave is not None:
            self._change(m.Stay(self._asked_to_leave.epoch, self._asked_to_leave.members), now)

    def _job_dir(self) -> Path:
        job = self._world().active
        return self._log_dir / (job.name if job else "idle")


def _formation(order: m.FormWorld) -> wire.Formation:
    """What each of its members is told."""
    by_host = groupby(order.members, key=lambda w: w.host)
    hosts = tuple((host, tuple(w.slot for w in workers)) for host, workers in by_host)
    return wire.Formation(order.epoch, hosts, order.store, order.root, ranges(order.receivers))
