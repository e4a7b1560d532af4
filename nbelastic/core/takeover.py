"""A new driver takes over a cluster whose driver was lost: its state is built from reports of agents and workers.

The snapshot provides only what agents and workers cannot know: limits, wanted hosts, the job's name. Which workers
live, train together, and at which commit, they report themselves. A world that is complete trains on undisturbed. Any
other is broken, as after a loss, and its survivors leave it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import (
    generation_end,
    host_lifecycle,
    jobs,
    losses,
    provisioning,
    setup_cells,
    takeover_hosts,
)
from nbelastic.core.cluster_snapshot import SavedCluster
from nbelastic.core.commands import Commands
from nbelastic.core.host_slots import workers_on
from nbelastic.core.persistent import PersistentSet
from nbelastic.core.state import ClusterState, HostPhase, Stage, WorkerState, format_ids, with_members, without
from nbelastic.core.state_holders import delete_kept_state, state_lives
from nbelastic.core.step import step
from nbelastic.core.takeover_hosts import OFFLINE, Reports
from nbelastic.protocol import events as ev
from nbelastic.protocol.agent_messages import AgentHello
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.worker_messages import WorkerReport

TOO_LATE = "it answered a new driver too late"


def resume(
    saved: SavedCluster,
    agents: Mapping[str, AgentHello],
    reports: Reports,
    now: float,
    *,
    problems: Mapping[str, str] | None = None,
    coming: Collection[str] = (),
) -> tuple[ClusterState, tuple[cmd.Command, ...]]:
    """The state at `now`, and the commands to carry out.

    `problems`: why agents cannot be used. `coming`: hosts that were starting, whose agents may still connect.
    """
    out: Commands = []
    cluster = takeover_hosts.restore_hosts(saved, agents, coming, now, out)
    cluster = takeover_hosts.restore_workers(cluster, agents, reports, dict(saved.ran), now)
    if saved.stopping:  # programs may still write a last checkpoint
        return _handle(_stop_old_programs(cluster, now, out), ev.StopRequested(saved.stopping), now, out), tuple(out)
    cluster = provisioning.stop_workers(cluster, saved.stopped, out)
    cluster = _presume_training(cluster, saved, reports)
    cluster = _lose_members(cluster, saved, reports, now, out)
    job = cluster.active
    inside = {}
    if job is not None:
        inside = {w: report for w, report in reports.items() if report.job == job.name and _is_there(cluster, w)}
        # The last driver may have begun a swap, or decided on one.
        out.append(cmd.KeepProgram(job.program, tuple(inside)))
        cluster = _restore_job(cluster, saved, inside, now, out)
    cluster = _stop_old_programs(cluster, now, out)
    cluster = provisioning.provision(_drain_surplus(cluster, now, out), now, out)
    if cluster.active is not None:
        cluster = _replay_messages(cluster, inside, now, out)
    for name, host in tuple(cluster.hosts.items()):
        if host.phase is HostPhase.STARTING and name in agents:
            agent, problem = agents[name], (problems or {}).get(name, "")
            ready = ev.AgentReady(name, agent.pid, agent.addresses, agent.port, problem, gpus=agent.gpus)
            cluster = _handle(cluster, ready, now, out)
    return _handle(cluster, ev.Ticked(), now, out), tuple(out)


def is_too_late(cluster: ClusterState, report: WorkerReport) -> bool:
    """Whether a worker that reports after the takeover runs a program that cannot go on: it missed what was decided."""
    is_in = report.formed and report.generation == cluster.generation and report.worker in cluster.member_set
    return report.busy and (not is_in or report.has_promised or report.last_event is not None)


def _handle(cluster: ClusterState, event: ev.Event, now: float, out: Commands) -> ClusterState:
    cluster, commands = step(cluster, event, now)
    out.extend(commands)
    return cluster


def _is_there(cluster: ClusterState, w: WorkerId) -> bool:
    return w in cluster.workers and w not in cluster.stopped


def _presume_training(cluster: ClusterState, saved: SavedCluster, reports: Reports) -> ClusterState:
    """Assume that unresponsive members train like the others. A call may hold their interpreter lock.

    Only if the others are in one complete world of the saved members, with the saved ranks.
    """
    job, members = cluster.active, saved.members
    known = [reports[w] for w in members if w in reports and _is_there(cluster, w)]
    unresponsive = [w for w in members if w not in reports and _is_there(cluster, w)]
    if job is None or not known or not unresponsive or len(known) + len(unresponsive) < len(members):
        return cluster
    generation = max(report.generation for report in reports.values())
    for report in known:
        world = (report.job, report.generation, report.size)
        if world != (job.name, generation, len(members)) or not report.formed or report.stop_reason:
            return cluster
        if members[report.rank] != report.worker or not _is_healthy(report.last_event):
            return cluster
    ran = frozenset(cell.version for cell in cluster.setup)
    like = cluster.workers[known[0].worker]
    trains = {
        w: replace(like, id=w, pid=cluster.workers[w].pid, state=WorkerState.RUNNING, store="", ran=ran)
        for w in unresponsive
    }
    return replace(without(cluster, trains, "starting", "unregistered"), workers=cluster.workers | trains)


def _lose_members(
    cluster: ClusterState, saved: SavedCluster, reports: Reports, now: float, out: Commands
) -> ClusterState:
    """Remove members that were lost, and replace those that do not answer though their processes live."""
    lost = frozenset(w for w in saved.members if w not in cluster.workers)
    if lost:
        out.append(cmd.Record("worker-lost", f"{format_ids(lost)} lost {OFFLINE}"))
    for w in saved.members:
        if _is_there(cluster, w) and w not in reports and cluster.workers[w].state is not WorkerState.RUNNING:
            cluster = losses.replace_worker(cluster, w, f"{w} froze (it did not answer a new driver)", now, out)
    return cluster


def _restore_job(
    cluster: ClusterState, saved: SavedCluster, inside: Reports, now: float, out: Commands
) -> ClusterState:
    """Find out which workers train together. `inside`: reports of workers that run the job's program."""
    job = cluster.active
    assert job is not None
    holders = tuple(w for w in sorted(inside, key=lambda w: (inside[w].rank, w)) if cluster.workers[w].has_state)
    finished = PersistentSet(w for w in holders if isinstance(inside[w].last_event, ev.WorkerSucceeded))
    asked_to_stop = [w for w in inside if inside[w].stop_reason]
    if asked_to_stop and not finished:
        return _end_stopped_job(with_members(cluster, holders), inside, asked_to_stop, now, out)
    if not holders:
        if not state_lives(cluster):
            why = f"no worker is left that holds the training state: the last one was lost {OFFLINE}"
            return jobs.end(cluster, "failed", why, now, out)
        return _abort_strays(cluster, inside, out)
    if cluster.kept_state is not None and max(inside[w].commit for w in holders) > cluster.kept_state.commit:
        cluster = delete_kept_state(cluster, out)
    stragglers = PersistentSet(asked_to_stop) & holders
    cluster = jobs.linger(cluster, now) if stragglers else cluster
    job = replace(job, formed=True, succeeded=finished, asked_to_stop=stragglers)
    members = _whole_world(inside)
    unresponsive = [w for w in saved.members if _is_there(cluster, w) and w not in inside]
    if not members and any(cluster.workers[w].state is WorkerState.RUNNING for w in unresponsive):
        members = saved.members  # unresponsive ones are assumed to train
    if members:
        return _continue_world(replace(cluster, job=replace(job, ranks=members)), members, inside, out)
    ranks = saved.ranks if set(holders) <= set(saved.ranks) else holders
    cluster = replace(with_members(cluster, holders), job=replace(job, ranks=ranks), stage=Stage.RUNNING)
    cluster = _abort_strays(cluster, inside, out)
    why = "the world was no longer complete when a new driver took over"
    was_left = saved.gathering or not any(inside[w].generation for w in holders)
    if not finished and was_left:
        return replace(jobs.abort_generation(cluster, why, out), stage=Stage.GATHERING, awaiting=cluster.member_set)
    if not _has_failed(saved, inside):  # the last driver was lost amid a planned change, which does not count
        cluster = replace(cluster, resets=cluster.resets - 1)
    return generation_end.break_generation(cluster, why, now, out)


def _has_failed(saved: SavedCluster, inside: Reports) -> bool:
    """Whether a member of the last world, or of the one that was to follow, was lost or has lost a connection."""
    events = [report.last_event for report in inside.values()]
    missing = not inside.keys() >= {*saved.members} or max(report.size for report in inside.values()) > len(inside)
    return missing or any(isinstance(event, ev.WorkerRaised) and not event.intact for event in events)


def _whole_world(inside: Reports) -> tuple[WorkerId, ...]:
    """The members, by rank, of the newest generation, if all of them are in it; else none."""
    formed = [report for report in inside.values() if report.formed]
    generation = max((report.generation for report in formed), default=0)
    by_rank = {
        report.rank: report for report in formed if report.generation == generation and _is_healthy(report.last_event)
    }
    whole = bool(by_rank) and len(by_rank) == next(iter(by_rank.values())).size
    return tuple(by_rank[rank].worker for rank in sorted(by_rank)) if whole else ()


def _is_healthy(message: object) -> bool:
    """Whether the world can go on after this message: an error of the user's code does not break it."""
    return not isinstance(message, ev.WorkerReady) and (not isinstance(message, ev.WorkerRaised) or message.intact)


def _continue_world(
    cluster: ClusterState, members: tuple[WorkerId, ...], inside: Reports, out: Commands
) -> ClusterState:
    """Let a complete world train on, and cancel a reconfiguration that the last driver had begun."""
    known = [inside[w] for w in members if w in inside]
    generation = known[0].generation
    cluster = replace(delete_kept_state(cluster, out), last_formed=generation)
    cluster = _abort_strays(with_members(cluster, members), inside, out)
    for later in range(generation + 1, max(report.highest_generation for report in known) + 1):
        out.append(cmd.DropWorld(later, members))
    if any(report.has_promised for report in known):
        out.append(cmd.CancelLeave(generation, members))
    text = f"{len(members)} workers train on in generation {generation}"
    out.append(cmd.Record("world-found", text, generation=generation))
    formation = cmd.FormWorld(generation, members, "", 0, ())
    return replace(cluster, generation=generation, stage=Stage.RUNNING, formation=formation)


def _abort_strays(cluster: ClusterState, inside: Reports, out: Commands) -> ClusterState:
    """Abort workers that are not members and wait for a generation that will not form."""
    others = (w for w, report in inside.items() if w not in cluster.member_set and report.busy)
    strays = tuple(
        w for w in others if inside[w].generation or inside[w].highest_generation > inside[w].left_generation
    )
    if strays:
        out.append(cmd.AbortWorld(cluster.highest_generation, strays, "a new driver forms another world"))
    return cluster


def _end_stopped_job(
    cluster: ClusterState, inside: Reports, asked_to_stop: list[WorkerId], now: float, out: Commands
) -> ClusterState:
    """End a job that the last driver had ended: some workers were asked to stop, but that was not saved."""
    for w in cluster.members:
        message = inside[w].last_event
        if isinstance(message, ev.WorkerRaised) and message.intact:
            why = f"rank {inside[w].rank} ({w}) raised {message.error}"
            return jobs.end(cluster, "failed", why, now, out, culprit=w)
    return jobs.end(cluster, "stopped", inside[asked_to_stop[0]].stop_reason, now, out)


def _drain_surplus(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Drain workers for which there is no slot any more, and remove hosts without workers."""
    for name, host in tuple(cluster.hosts.items()):
        surplus = [
            w for w in workers_on(cluster, name) if host.phase is HostPhase.DRAINING or w.slot >= host.spec.slots
        ]
        cluster = host_lifecycle.remove_if_empty(provisioning.drain_workers(cluster, surplus, now, out), name, out)
    return cluster


def _replay_messages(cluster: ClusterState, inside: Reports, now: float, out: Commands) -> ClusterState:
    """Handle the last message of each worker: errors, then newcomers, then members. Idle workers get the job."""
    job = cluster.active
    assert job is not None
    present = [w for w in inside if _is_there(cluster, w)]
    messages = {
        w: inside[w].last_event for w in sorted(present, key=lambda w: (w in cluster.member_set, inside[w].rank, w))
    }
    newcomers = [w for w in present if inside[w].busy and w not in cluster.member_set]
    cluster = provisioning.expect_workers(cluster, newcomers)
    for message in messages.values():
        if isinstance(message, ev.WorkerRaised):
            cluster = _handle(cluster, message, now, out)
    is_about_to_end = not all(report.busy or (job.formed and not report.holds_state) for report in inside.values())
    if not is_about_to_end:
        for w in tuple(cluster.workers):
            cluster = setup_cells.run_next(cluster, w, now, out)
    for w, message in messages.items():
        if not isinstance(message, ev.WorkerReady):
            continue
        if (
            w not in cluster.member_set or message.generation >= cluster.generation
        ):  # else it is aborted, and repeats it
            cluster = _handle(cluster, message, now, out)
    return cluster


def _stop_old_programs(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Stop programs of a job that has ended."""
    name = cluster.active.name if cluster.active else ""
    running = tuple(w for w, worker in cluster.workers.items() if worker.job and worker.job != name)
    for w in running:
        out.append(cmd.StopProgram(cluster.workers[w].job, (w,), "its job is over"))
    return jobs.linger(cluster, now) if running else cluster
