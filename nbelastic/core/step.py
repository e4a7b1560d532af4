"""`step(cluster, event, now) -> (cluster, commands)`: all decisions about hosts, workers, jobs and scripts.

The shape is that of dask.distributed's `worker_state_machine` (stimulus in, instructions out). Each wait has a reason,
as in torchft's `quorum_compute`. Stale events are dropped first. Nothing in this package waits, locks or calls back. A
function that is named like an event handles it. `progress` in a module does what became possible by any event.
"""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import (
    backoff,
    breakpoints,
    connections,
    deadlines,
    gpus,
    halts,
    hangs,
    host_admission,
    jobs,
    liveness,
    losses,
    partitions,
    provisioning,
    reconfiguration,
    replicas,
    requests,
    script_job,
    setup_cells,
    stage_deadlines,
    stalls,
    stopping,
    swaps,
    worker_events,
)
from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.deadlines import deadline
from nbelastic.core.state import ClusterState, with_worker
from nbelastic.core.together import only_waits
from nbelastic.protocol import events as ev
from nbelastic.protocol import program_events as pev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.connection_events import EnvironmentReported, HostDisconnected, HostReconnected

__all__ = ["deadline", "step"]


def step(
    cluster: ClusterState, event: ev.Event, now: float, *, more: bool = False
) -> tuple[ClusterState, tuple[cmd.Command, ...]]:
    """The state after `event`, received at `now` (seconds, monotonic), and the commands to carry out.

    `more`: the step of another event at the same time follows. The reason to wait may then be left to that one.
    """
    out: Commands = []
    before = cluster
    cluster = deadlines.act(cluster, now, out)
    worker = getattr(event, "worker", None)
    if worker is None or worker in cluster.workers:
        handle = _handle if worker is None else _handle_worker_event  # those of workers come in thousands
        cluster = handle(cluster, event, now, out)
    if cluster.failed is not before.failed:  # others take the places of failed workers, and make place for them again
        cluster = provisioning.provision(cluster, now, out)
    if more and only_waits(before, cluster, now):
        return cluster, tuple(out)
    if cluster.disconnected:
        cluster = connections.progress(cluster, now, out)
    if cluster.partition_check.pairs:
        cluster = partitions.progress(cluster, now, out)
    # the partition check may have excluded a partner of a probed host
    cluster = host_admission.progress(cluster, now, out)
    while cluster.ending:
        drained = requests.drain_succeeded_hosts(cluster, now, out)
        if drained is cluster:
            break
        # a host that had no workers has left, and may be a partner
        cluster = host_admission.progress(drained, now, out)
    if cluster.kept_state is not None:  # on a host that may be lost or gone by now
        cluster = hangs.progress(cluster, now, out)
    if cluster.stopping:
        cluster = stopping.retire(cluster, now, out)
    if cluster.trial is not None:
        cluster = setup_cells.progress(cluster, now, out)
    if cluster.script is not None or cluster.external_nodes:
        cluster = script_job.progress(before, cluster, now, out)
    cluster = reconfiguration.progress(backoff.release_held(cluster, now), now, out)
    while cluster.disconnected:  # a stage that has just begun may need a host that receives no orders
        connected = connections.progress(cluster, now, out)
        if connected is cluster:
            break
        cluster = reconfiguration.progress(host_admission.progress(connected, now, out), now, out)
    if cluster.deferred_events and cluster.next_formation is None:
        cluster = worker_events.handle_deferred(cluster, now, out)
    cluster = stage_deadlines.update(backoff.release_held(cluster, now), now)
    cluster = deadlines.set_stop_deadlines(before, cluster, now)
    if cluster.stall is not None:
        cluster = stalls.explain(cluster)
    return cluster, tuple(out)


def _handle(cluster: ClusterState, event: ev.Event, now: float, out: Commands) -> ClusterState:
    """Handle events of hosts, clients and scripts. All other events are of workers."""
    match event:
        case ev.HostAdded() | ev.HostRemoved() | ev.HostsDiscovered() | ev.Scaled():
            return requests.change_hosts(cluster, event, now, out)
        case ev.DiscoveryFailed(reason=reason):
            return requests.discovery_failed(cluster, reason, now, out)
        case ev.AgentReady():
            return host_admission.agent_ready(cluster, event, now, out)
        case ev.AgentLost(host=name, reason=reason):
            return losses.host_lost(cluster, name, reason, now, out)
        case HostDisconnected() | HostReconnected() | EnvironmentReported():
            return connections.changed(cluster, event, now, out)
        case ev.GpusReported():
            return provisioning.provision(gpus.reported(cluster, event, out), now, out)
        case ev.Probed():
            return partitions.probed(host_admission.probed(cluster, event), event)
        case ev.ExternalAccessOpened(address=address):
            return host_admission.external_access_opened(cluster, address, now, out)
        case ev.SetupSubmitted():
            return setup_cells.submit(cluster, event, now, out)
        case ev.SetupCleared(key=key):
            return setup_cells.clear(cluster, key, now, out)
        case ev.JobSubmitted(job=job):
            return jobs.submit(cluster, job, now, out)
        case ev.JobStopRequested(job=job, reason=reason):
            return requests.stop_job(cluster, job, reason, now, out)
        case ev.CommitCellSubmitted():
            return halts.submit_cell(cluster, event)
        case ev.CommitCellCancelled(number=number):
            return halts.cancel_cell(cluster, number, out)
        case pev.SwapSubmitted():
            return swaps.submit(cluster, event, out)
        case pev.SwapCancelled(program=program):
            return swaps.cancel(cluster, program, now, out)
        case ev.PauseRequested(by=by):
            return halts.pause(cluster, by, out)
        case ev.ResumeRequested(by=by):
            return halts.resume(cluster, by, out)
        case ev.StepsRequested():
            return halts.run_steps(cluster, event, out)
        case ev.StopRequested():
            return stopping.stop(cluster, event, now, out)
        case ev.StallDetected() | ev.StallResolved():
            return stalls.handle(cluster, event, now, out)
        case sev.ScriptSubmitted():
            return script_job.submit(cluster, event, now, out)
        case sev.ExternalNodeJoined():
            return script_job.external_node_joined(cluster, event, now, out)
        case sev.NodeReady():
            return script_job.node_ready(cluster, event, now, out)
        case sev.NodeStarted() | sev.NodeFailed() | sev.NodeSucceeded() | sev.NodesHeard() | sev.NodeLeft():
            return script_job.node_event(cluster, event, now, out)
        case ev.Ticked():
            return cluster
        case _:
            return _handle_worker_event(cluster, event, now, out)


def _handle_worker_event(cluster: ClusterState, event: ev.Event, now: float, out: Commands) -> ClusterState:
    match event:
        case ev.WorkerReady():
            return worker_events.worker_ready(cluster, event, now, out)
        case (
            ev.WorkerFormed()
            | ev.LeaveAcknowledged()
            | ev.WorkerHalted()
            | ev.WorkerRaised()
            | ev.WorkerSucceeded()
            | ev.StoreOffered()
        ):
            return worker_events.member_event(cluster, event, now, out)
        case ev.WorkerPrepared():
            return reconfiguration.worker_prepared(cluster, event, now)
        case ev.WorkerStarted(worker=w, pid=pid):
            return with_worker(cluster, replace(cluster.workers[w], pid=pid))
        case ev.RestartRequested(worker=w, by=by):
            return requests.restart_worker(cluster, w, by, now, out)
        case ev.WorkerExited():
            return losses.worker_exited(cluster, event, now, out)
        case ev.WorkerFrozen():
            return losses.worker_frozen(cluster, event, now, out)
        case ev.WorkerSilent():
            return liveness.worker_silent(stage_deadlines.worker_silent(cluster, event, now), event, now, out)
        case ev.WorkerResponded(worker=w):
            return liveness.worker_responded(cluster, w)
        case ev.WorkerHung():
            return hangs.worker_hung(cluster, event, now, out)
        case ev.StateKept():
            return hangs.state_kept(cluster, event, out)
        case ev.WorkerRegistered(worker=w):
            return setup_cells.worker_registered(cluster, w, now, out)
        case ev.SetupEnded():
            return setup_cells.setup_ended(cluster, event, now, out)
        case ev.CommitCellEnded():
            return halts.cell_ended(cluster, event, now, out)
        case pev.BreakpointReached():
            return stalls.breakpoint_reached(cluster, event, out)
        case pev.BreakpointLeft(worker=w):
            return breakpoints.left(cluster, w)
        case pev.ReplicaDiffered():
            return replicas.differed(cluster, event, now, out)
        case pev.SwapFailed():
            return swaps.failed(cluster, event, now, out)
        case ev.PositionReported():
            return stalls.handle(stage_deadlines.position_reported(cluster, event, now), event, now, out)
        case ev.ProgramEnded():
            return worker_events.program_ended(cluster, event, now, out)
        case _:
            raise TypeError(f"{type(event).__name__} is not an event that step() knows")
