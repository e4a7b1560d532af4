"""When the next deadline elapses, and what the core does then.

Deadlines of stages, in which members wait for one another, are in `stage_deadlines`.
"""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import (
    arrivals,
    connections,
    generations,
    halts,
    losses,
    provisioning,
    requests,
    script_job,
    script_rounds,
    setup_cells,
    stage_deadlines,
    worker_events,
)
from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.persistent import EMPTY, PersistentSet
from nbelastic.core.state import ClusterState
from nbelastic.protocol.cluster_limits import NEVER
from nbelastic.protocol.ids import WorkerId


def deadline(cluster: ClusterState, now: float) -> float:
    """When to send `Ticked` if nothing else happens, `now` at the earliest; infinity: never."""
    limits = cluster.limits
    times = (
        cluster.reason_until,
        cluster.wake_at,
        cluster.linger_until or NEVER,
        cluster.agents_end_by,
        min(cluster.end_deadlines.values(), default=NEVER),
        _next_end(cluster),
        cluster.suspect_since + limits.timeouts.grace if cluster.suspects else NEVER,
        generations.elastic_timeout_at(cluster),
        stage_deadlines.deadline(cluster),
        cluster.halt.until,
        connections.deadline(cluster) if cluster.disconnected else NEVER,
        cluster.partition_check.until,
        cluster.setup_by,
        min(cluster.held_back.values(), default=NEVER),
        min((admission.until for admission in cluster.probing.values()), default=NEVER) if cluster.probing else NEVER,
        script_rounds.deadline(cluster.script) if cluster.script is not None else NEVER,
        min(cluster.ending_nodes.values(), default=NEVER),
    )
    return max(now, min(times))


def act(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Do what elapsed deadlines require. Each event lets time pass, not only `Ticked`."""
    limits = cluster.limits
    if cluster.linger_until and now >= cluster.linger_until:
        cluster = _kill_lingering(cluster, now, out)
    if now >= min(cluster.end_deadlines.values(), default=NEVER):
        cluster = _count_as_ended(cluster, now, out)
    if now >= _next_end(cluster):
        cluster = requests.end_announced_hosts(cluster, now, out)
    if now >= min(cluster.ending_nodes.values(), default=NEVER):
        cluster = script_job.count_nodes_as_ended(cluster, now, out)
    if now >= cluster.setup_by:
        cluster = _kill_overdue_setup(cluster, now, out)
    if cluster.suspects and now >= cluster.suspect_since + limits.timeouts.grace:
        cluster = worker_events.break_unexplained(cluster, now, out)
    cluster = halts.act(stage_deadlines.act(cluster, now, out), now, out)
    if now >= generations.elastic_timeout_at(cluster):
        cluster = generations.fail_too_few(cluster, now, out)
    if now >= cluster.wake_at:
        cluster = provisioning.provision(_replace_overdue_starts(cluster, now, out), now, out)
    return cluster


def _next_end(cluster: ClusterState) -> float:
    """When something is due for a host that was announced to end."""
    if not cluster.ending:
        return NEVER
    times = [ending.at if ending.save_at is None else ending.save_at for ending in cluster.ending.values()]
    return min(
        [*times, *(requests.succession_at(cluster, ending) for ending in cluster.ending.values())], default=NEVER
    )


def _replace_overdue_starts(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Count a host as lost whose agent has not connected in time. Replace workers that have not started in time."""
    timeouts = cluster.limits.timeouts
    for name, host in tuple(cluster.hosts.items()):
        if now >= arrivals.agent_deadline(cluster, host):
            why = f"its agent has sent nothing for {timeouts.agent:g} s"
            if host.prepares_by:
                why = f"it was not ready within {timeouts.environment:g} s: {host.reason}"
            cluster = losses.exclude_host(cluster, name, why, now, out, kind="host-lost")
    for w in [w for w in sorted(cluster.starting) if now >= arrivals.worker_deadline(cluster, w)]:
        why = f"{w} did not start within {now - cluster.workers[w].since:.0f} s"
        cluster = losses.replace_worker(cluster, w, why, now, out)
    return cluster


def _kill_lingering(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Kill programs that have not stopped in time: first those that hold no training state, at `linger_last` all."""
    job, timeouts = cluster.active, cluster.limits.timeouts
    name, stragglers = (job.name, job.asked_to_stop) if job else ("", EMPTY)
    asked = [w for w, worker in cluster.workers.items() if worker.job and (worker.job != name or w in stragglers)]
    is_last = now >= cluster.linger_last
    overdue = [w for w in asked if is_last or not cluster.workers[w].has_state]
    cluster = replace(cluster, linger_until=0.0 if len(overdue) == len(asked) else cluster.linger_last)
    for w in overdue:
        limit = timeouts.stop if cluster.workers[w].has_state else timeouts.leave
        text = f"{w} did not stop within {limit:g} s and is killed"
        out.append(cmd.Record("worker-killed", text, host=w.host, worker=str(w)))
        cluster = losses.remove_from_job(cluster, (w,), f"{w} did not stop", now, out, alive=True)
    return provisioning.stop_workers(cluster, overdue, out, kill=True)


def set_stop_deadlines(before: ClusterState, cluster: ClusterState, now: float) -> ClusterState:
    """Give each worker that was asked to end a deadline. While the cluster stops, only its agent has one."""
    asked: PersistentSet[WorkerId] = EMPTY if cluster.stopping else cluster.stopped
    is_same = cluster.stopped is before.stopped and len(cluster.end_deadlines) == len(asked)
    if is_same or cluster.end_deadlines.keys() == asked:
        return cluster
    end = now + cluster.limits.timeouts.end
    return replace(cluster, end_deadlines={w: cluster.end_deadlines.get(w, end) for w in sorted(asked)})


def _count_as_ended(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Remove workers whose ends were not reported in time, so that their slots and hosts become free."""
    limit = cluster.limits.timeouts.end
    for w in [w for w, until in cluster.end_deadlines.items() if now >= until and w in cluster.stopped]:
        text = f"{w} was asked to end, and its end was not reported within {limit:g} s: it counts as ended"
        out.append(cmd.Record("worker-lost", text, host=w.host, worker=str(w)))
        cluster = losses.worker_lost(cluster, w, text, now, out)
    return cluster


def _kill_overdue_setup(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Replace workers whose setup cell has run for too long: they can run nothing else meanwhile."""
    overdue, cluster = setup_cells.overdue(cluster, now)
    for w in overdue:
        why = f"{w} had not ended a setup cell after {cluster.limits.timeouts.setup:g} s and was killed"
        cluster = losses.replace_worker(cluster, w, why, now, out)
    return cluster
