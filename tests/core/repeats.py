"""Messages that arrive twice, and events that are decided on at once: both lead to what the events do one by one."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState
from nbelastic.core.step import step
from nbelastic.core.together import decide, only_waits
from nbelastic.driver.decisions import IN_BATCHES
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId

WORDS = (  # messages of agents and workers, and requests about jobs
    ev.AgentReady,
    ev.Probed,
    ev.PositionReported,
    ev.WorkerStarted,
    ev.WorkerRegistered,
    ev.SetupEnded,
    ev.WorkerExited,
    ev.WorkerFrozen,
    ev.WorkerSilent,
    ev.WorkerResponded,
    ev.WorkerReady,
    ev.WorkerRaised,
    ev.StoreOffered,
    ev.WorkerPrepared,
    ev.LeaveAcknowledged,
    ev.WorkerHalted,
    ev.CommitCellEnded,
    ev.PauseRequested,
    ev.ResumeRequested,
    ev.WorkerFormed,
    ev.WorkerSucceeded,
    ev.WorkerHung,
    ev.StateKept,
    ev.ProgramEnded,
    ev.JobSubmitted,
    ev.JobStopRequested,
)


def check_doubled(cluster: ClusterState, event: ev.Event, now: float) -> None:
    """A message that arrives twice in a row has no effect the second time.

    By design, repeated questions are answered again: of a worker that waits for a world, whose connections broke, or that
    hangs, and of a job that was refused.
    """
    if not isinstance(event, WORDS):
        return
    again, commands = step(cluster, event, now)
    again = replace(again, reason=cluster.reason)
    changed = {
        name: getattr(again, name)
        for name in cluster.__struct_fields__
        if getattr(again, name) != getattr(cluster, name)
    }
    assert not changed, f"{event} changes {changed} when it arrives twice"
    match event:
        case ev.WorkerReady(worker=w) | ev.WorkerRaised(worker=w):
            answers = (cmd.FormWorld, cmd.AbortWorld, cmd.StopProgram, cmd.LoadKeptState)
            commands = [c for c in commands if not isinstance(c, answers) or _receivers(c) != (w,)]
        case ev.WorkerHung() | ev.StateKept():
            commands = [c for c in commands if not isinstance(c, cmd.EndHungWorker | cmd.DeleteKeptState)]
        case ev.JobSubmitted(job=job):
            commands = [c for c in commands if not isinstance(c, cmd.EndJob) or c.job != job]
    assert not commands, f"{event} is answered twice: {commands}"


def _receivers(command: cmd.FormWorld | cmd.AbortWorld | cmd.StopProgram | cmd.LoadKeptState) -> tuple[WorkerId, ...]:
    match command:
        case cmd.LoadKeptState(worker=w):
            return (w,)
        case cmd.FormWorld(to=workers) | cmd.AbortWorld(members=workers) | cmd.StopProgram(workers=workers):
            return workers


def check_more(
    before: ClusterState, event: ev.Event, now: float, cluster: ClusterState, commands: tuple[cmd.Command, ...]
) -> None:
    """If the driver decides on several events at once, the last one leads to the same state and commands as one by one."""
    if type(event) in IN_BATCHES:
        left_out, first = step(before, event, now, more=True)
        _check_together(before, event, now, left_out, first)
        _compare(left_out, first, event, now, cluster, commands)


def step_both_ways(before: ClusterState, event: ev.Event, now: float) -> tuple[ClusterState, tuple[cmd.Command, ...]]:
    """As `step`, and as `check_more`. It makes a second step only if the first one has left something out."""
    more = type(event) in IN_BATCHES
    left_out, first = step(before, event, now, more=more)
    if more:
        _check_together(before, event, now, left_out, first)
    if not (more and only_waits(before, left_out, now)):
        return left_out, first
    cluster, commands = step(before, event, now)
    _compare(left_out, first, event, now, cluster, commands)
    return cluster, commands


def _check_together(
    before: ClusterState, event: ev.Event, now: float, left_out: ClusterState, first: tuple[cmd.Command, ...]
) -> None:
    """If the driver decides on this event together with others, that leads to the same as `step` alone."""
    together, count = decide(before, (event,), now)
    assert not count or (together, first) == (left_out, ()), event


def _compare(
    left_out: ClusterState,
    first: tuple[cmd.Command, ...],
    event: ev.Event,
    now: float,
    cluster: ClusterState,
    commands: tuple[cmd.Command, ...],
) -> None:
    if left_out == cluster and first == commands:
        return
    at_once, last = step(left_out, ev.Ticked(), now)
    if at_once == cluster and (*first, *last) == commands:
        return
    one_by_one, others = step(cluster, ev.Ticked(), now)
    assert at_once == one_by_one, event
    assert (*first, *last) == (*commands, *others), event
