"""The end of the cluster, and of programs and setup cells that have had their time."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import generations, jobs, provisioning, setup
from nbelastic.core.state import ClusterState, HostPhase, WorkerState
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.limits import NEVER

Commands = list[cmd.Command]


def stop(cluster: ClusterState, event: ev.StopRequested, now: float, out: Commands) -> ClusterState:
    """The cluster is to end: programs first, which may write a last checkpoint, then the agents that they run on."""
    reason = event.reason
    if not cluster.stopping:
        cluster = jobs.end(replace(cluster, stopping=reason), "stopped", f"the cluster was stopped: {reason}", now, out)
        # of the others nothing will be heard that one could wait for
        there = {name: host for name, host in cluster.hosts.items() if host.phase is not HostPhase.LOST}
        runs = any(worker.job for worker in cluster.workers.values())
        cluster = replace(
            cluster,
            workers={w: replace(worker, state=WorkerState.STOPPED) for w, worker in cluster.workers.items()},
            hosts={name: replace(host, phase=HostPhase.DRAINING) for name, host in there.items()},
            stopped=frozenset(cluster.workers),
            starting=frozenset(),
            failed=frozenset(),
            probing={},
            trial=None,
            setup_by=NEVER,
            still=None,
            wake_at=NEVER,
            linger_until=cluster.linger_until if runs else 0.0,
        )
    if event.within is not None and cluster.linger_until:
        last = min(cluster.linger_last, now + event.within)
        cluster = replace(cluster, linger_until=min(cluster.linger_until, last), linger_last=last)
    return cluster


def retire(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Agents are told to end whose workers' programs have ended, or had their time. The last ones are not waited for long."""
    busy = {w.host for w, worker in cluster.workers.items() if worker.job} if cluster.linger_until else frozenset()
    idle = [name for name in cluster.hosts if name not in cluster.retired and name not in busy]
    if idle:
        out.extend(cmd.StopAgent(name) for name in idle)
        close_by = now + cluster.limits.timeouts.close
        return replace(cluster, retired=cluster.retired.union(idle), close_by=close_by)
    if now >= cluster.close_by:
        for name in [name for name in cluster.hosts if name in cluster.retired]:
            cluster = generations.host_gone(cluster, name, "it did not end in time", now, out)
        cluster = replace(cluster, close_by=NEVER)
    return cluster


def kill_lingering(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Programs that were told to stop have not: first those that hold no training state are killed, at the end all."""
    job, timeouts = cluster.active, cluster.limits.timeouts
    name, late = (job.name, job.late) if job else ("", frozenset())
    told = [w for w, worker in cluster.workers.items() if worker.job and (worker.job != name or w in late)]
    over = now >= cluster.linger_last
    stuck = [w for w in told if over or not cluster.workers[w].has_state]
    cluster = replace(cluster, linger_until=0.0 if len(stuck) == len(told) else cluster.linger_last)
    for w in stuck:
        limit = timeouts.stop if cluster.workers[w].has_state else timeouts.leave
        text = f"{w} did not stop within {limit:g} s and is killed"
        out.append(cmd.Record("worker-killed", text, host=w.host, worker=str(w)))
        cluster = generations.lose(cluster, (w,), f"{w} did not stop", now, out, keep=True)
    return provisioning.stop_workers(cluster, stuck, out, kill=True)


def expect_ends(cluster: ClusterState, now: float) -> ClusterState:
    """Each worker that was told to end has a deadline. When the cluster is stopped, that of its agent counts."""
    told = frozenset[WorkerId]() if cluster.stopping else cluster.stopped
    if cluster.ends.keys() == told:
        return cluster
    end = now + cluster.limits.timeouts.end
    return replace(cluster, ends={w: cluster.ends.get(w, end) for w in sorted(told)})


def give_up(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Workers whose ends were not reported in time count as ended: their slots, and their hosts, do not wait for that."""
    limit = cluster.limits.timeouts.end
    for w in [w for w, until in cluster.ends.items() if now >= until and w in cluster.stopped]:
        text = f"{w} was told to end, and its end was not reported within {limit:g} s: it counts as ended"
        out.append(cmd.Record("worker-lost", text, host=w.host, worker=str(w)))
        cluster = generations.gone(cluster, w, text, now, out)
    return cluster


def kill_overdue(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Their setup cells have not ended, and their engines take no other code."""
    late, cluster = setup.overdue(cluster, now)
    for w in late:
        out.append(cmd.StopWorker(w, kill=True))
        why = f"{w} had not ended a setup cell after {cluster.limits.timeouts.setup:g} s and was killed"
        cluster = generations.gone(cluster, w, why, now, out)
    return cluster
