"""TODO."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import (
    arrivals,
    generations,
    losses,
    provisioning,
    script_rounds,
    setup_cells,
    stage_deadlines,
    worker_events,
)
from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.limits import NEVER

Commands = list[cmd.Command]


def deadline(cluster: ClusterState, now: float) -> float:
    """When, `now` at the earliest, to send `Ticked` if nothing else happens; infinity if never."""
    limits = cluster.limits
    times = (
        cluster.reason_until,
        cluster.wake_at,
        cluster.linger_until or NEVER,
        cluster.agents_end_by,
        min(cluster.end_deadlines.values(), default=NEVER),
        cluster.suspect_since + limits.timeouts.grace if cluster.suspects else NEVER,
        generations.elastic_timeout_at(cluster),
        stage_deadlines.deadline(cluster),
        cluster.partition_check.until,
        cluster.setup_by,
        min(cluster.held_back.values(), default=NEVER),
        min((admission.until for admission in cluster.probing.values()), default=NEVER) if cluster.probing else NEVER,
        script_rounds.deadline(cluster.script) if cluster.script is not None else NEVER,
    )
    return max(now, min(times))


def act(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """What has a deadline of its own, and it has come. Time passes with every event, not only with `Ticked`."""
    limits = cluster.limits
    if cluster.linger_until and now >= cluster.linger_until:
        cluster = _kill_lingering(cluster, now, out)
    if now >= min(cluster.end_deadlines.values(), default=NEVER):
        cluster = _count_as_ended(cluster, now, out)
    if now >= cluster.setup_by:
        cluster = _kill_overdue_setup(cluster, now, out)
    if cluster.suspects and now >= cluster.suspect_since + limits.timeouts.grace:
        cluster = worker_events.break_unexplained(cluster, now, out)
    cluster = stage_deadlines.act(cluster, now, out)
    if now >= generations.elastic_timeout_at(cluster):
        cluster = generations.fail_too_few(cluster, now, out)
    return (
        provisioning.provision(_replace_overdue_starts(cluster, now, out), now, out)
        if now >= cluster.wake_at
        else cluster
    )


def _replace_overdue_starts(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """They have had their time: their hosts count as lost, and other workers are started in their place."""
    timeouts = cluster.limits.timeouts
    for name, host in tuple(cluster.hosts.items()):
        if now >= arrivals.agent_deadline(cluster, host):
            why = f"its agent has sent nothing for {timeouts.agent:g} s"
            cluster = losses.exclude_host(cluster, name, why, now, out, kind="host-lost")
    for w in [w for w in sorted(cluster.starting) if now >= arrivals.worker_deadline(cluster, w)]:
        why = f"{w} did not start within {now - cluster.workers[w].since:.0f} s"
        out.append(cmd.StopWorker(w, kill=True))
        cluster = losses.worker_lost(cluster, w, why, now, out)
    return cluster


def _kill_lingering(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Programs that were told to stop have not: first those that hold no training state are killed, at the end all."""
    job, timeouts = cluster.active, cluster.limits.timeouts
    name, late = (job.name, job.asked_to_stop) if job else ("", frozenset())
    told = [w for w, worker in cluster.workers.items() if worker.job and (worker.job != name or w in late)]
    over = now >= cluster.linger_last
    stuck = [w for w in told if over or not cluster.workers[w].has_state]
    cluster = replace(cluster, linger_until=0.0 if len(stuck) == len(told) else cluster.linger_last)
    for w in stuck:
        limit = timeouts.stop if cluster.workers[w].has_state else timeouts.leave
        text = f"{w} did not stop within {limit:g} s and is killed"
        out.append(cmd.Record("worker-killed", text, host=w.host, worker=str(w)))
        cluster = losses.remove_from_job(cluster, (w,), f"{w} did not stop", now, out, keep=True)
    return provisioning.stop_workers(cluster, stuck, out, kill=True)


def set_stop_deadlines(cluster: ClusterState, now: float) -> ClusterState:
    """Each worker that was told to end has a deadline. When the cluster is stopped, that of its agent counts."""
    told = frozenset[WorkerId]() if cluster.stopping else cluster.stopped
    if cluster.end_deadlines.keys() == told:
        return cluster
    end = now + cluster.limits.timeouts.end
    return replace(cluster, end_deadlines={w: cluster.end_deadlines.get(w, end) for w in sorted(told)})


def _count_as_ended(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Workers whose ends were not reported in time count as ended: their slots, and their hosts, do not wait for that."""
    limit = cluster.limits.timeouts.end
    for w in [w for w, until in cluster.end_deadlines.items() if now >= until and w in cluster.stopped]:
        text = f"{w} was asked to end, and its end was not reported within {limit:g} s: it counts as ended"
        out.append(cmd.Record("worker-lost", text, host=w.host, worker=str(w)))
        cluster = losses.worker_lost(cluster, w, text, now, out)
    return cluster


def _kill_overdue_setup(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Their setup cells have not ended, and their engines take no other code."""
    late, cluster = setup_cells.overdue(cluster, now)
    for w in late:
        out.append(cmd.StopWorker(w, kill=True))
        why = f"{w} had not ended a setup cell after {cluster.limits.timeouts.setup:g} s and was killed"
        cluster = losses.worker_lost(cluster, w, why, now, out)
    return cluster
