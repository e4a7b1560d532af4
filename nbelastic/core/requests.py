"""What clients and the discovery request: hosts, limits, restarts, ends of jobs."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import host_lifecycle, jobs, losses, provisioning, script_job, stopping
from nbelastic.core.commands import Commands
from nbelastic.core.host_slots import workers_on
from nbelastic.core.state import ClusterState, Ending, HostPhase
from nbelastic.core.state_holders import alone_holds_state, state_lives
from nbelastic.protocol import events as ev
from nbelastic.protocol.cluster_limits import NEVER
from nbelastic.protocol.ids import WorkerId

FAR = 30 * 86400.0  # seconds: the end of a host that is further away is not shown

HostsEvent = ev.HostAdded | ev.HostRemoved | ev.HostsDiscovered | ev.Scaled


def change_hosts(cluster: ClusterState, event: HostsEvent, now: float, out: Commands) -> ClusterState:
    """Change which hosts the cluster uses, or how many workers may run."""
    if cluster.stopping:
        return cluster
    before = cluster
    match event:
        case ev.HostAdded(host=spec, by_hand=False) if (
            spec.name in cluster.hosts
        ):  # it is tried again, after its back-off
            return cluster
        case ev.HostAdded(host=spec, by=by, by_hand=by_hand):
            cluster = replace(cluster, removed_hosts=cluster.removed_hosts - {spec.name})
            cluster = host_lifecycle.add(cluster, spec, now, out, by=by or "discovery", by_hand=by_hand)
        case ev.HostRemoved():
            cluster = host_lifecycle.note_removed(cluster, event.name)
            cluster = _remove_host(cluster, event, now, out)
            cluster = script_job.remove(cluster, event, out)
        case ev.HostsDiscovered(hosts=specs):
            cluster = host_lifecycle.discovered(replace(cluster, discovered=True), specs, now, out)
        case ev.Scaled(min=low, max=high, by=by):
            out.append(cmd.Record("scaled", f"min {low}, max {high if high is not None else 'unlimited'} by {by}"))
            cluster = replace(cluster, limits=replace(cluster.limits, min=low, max=high), settling_since=now)
            cluster = provisioning.keep_leavers(cluster)
        case _:
            assert_never(event)
    provisioning.record_shortage(before, cluster, out)
    return provisioning.provision(cluster, now, out)


def discovery_failed(cluster: ClusterState, reason: str, now: float, out: Commands) -> ClusterState:
    """Stop a cluster whose discovery has never answered and that has no hosts; else record the failure only."""
    if not cluster.discovered and not cluster.hosts:
        return stopping.stop(cluster, ev.StopRequested(f"host discovery failed: {reason}"), now, out)
    out.append(cmd.Record("discovery-failed", reason))
    return cluster


def _remove_host(cluster: ClusterState, event: ev.HostRemoved, now: float, out: Commands) -> ClusterState:
    """Drain a host; or, with `event.now`, kill its workers at once. Neither counts as a failure."""
    name, by = event.name, event.by or "discovery"
    host = cluster.hosts.get(name)
    if host is None:
        return host_lifecycle.forget_end(cluster, name)
    if event.within is not None:
        saves_after = max(event.within - cluster.limits.timeouts.checkpoint, event.within / 2)
        ending = Ending(now + event.within, now + saves_after, by=by)
        known = cluster.ending.get(name, ending)
        ending = min(known, ending, key=lambda each: each.at)
        successor = known.successor if event.replaced else ""
        if event.replaced and name not in cluster.ending and host.phase is not HostPhase.DRAINING:
            cluster, successor = host_lifecycle.add_successor(cluster, host, by, now, out)
        cluster = replace(cluster, ending={**cluster.ending, name: replace(ending, successor=successor)})
        if successor:
            return cluster  # it trains on: see `drain_succeeded_hosts`
    if host.phase is HostPhase.DRAINING and not event.now:
        return cluster
    how = "at once" if event.now else "at the next commit"
    how += f", and ends within {round(event.within, 1):g} s" if event.within is not None and event.within < FAR else ""
    cluster = host_lifecycle.drain(cluster, name, how, by, out)
    workers = workers_on(cluster, name)
    if event.now:
        if host_lifecycle.has_script_workers(cluster, name):  # they are not waited for
            cluster = replace(cluster, ending_nodes={**cluster.ending_nodes, name: now})
        cluster = losses.remove_from_job(cluster, workers, f"host {name} was removed at once", now, out, alive=True)
        cluster = provisioning.stop_workers(cluster, workers, out, kill=True)
    else:
        cluster = provisioning.drain_workers(cluster, workers, now, out)
    return host_lifecycle.remove_if_empty(cluster, name, out)


def succession_at(cluster: ClusterState, ending: Ending) -> float:
    """When a host drains that has a successor: when that is up, or gone, and at the latest some time before its end."""
    if not ending.successor:
        return NEVER
    successor = cluster.hosts.get(ending.successor)
    return 0.0 if successor is None or successor.is_up else ending.at - cluster.limits.timeouts.drain


def drain_succeeded_hosts(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Let workers leave hosts whose successors are up, or which end soon."""
    ready = [(name, ending) for name, ending in cluster.ending.items() if now >= succession_at(cluster, ending)]
    for name, ending in ready:
        notice = ev.HostRemoved(name, by=ending.by, within=max(0.0, ending.at - now))
        cluster = _remove_host(cluster, notice, now, out)
    return provisioning.provision(cluster, now, out) if ready else cluster


def end_announced_hosts(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Kill the workers of draining hosts whose time is over. It does not count as a failure either.

    Some seconds earlier, stop a training whose state only such hosts hold: it may write a checkpoint.
    """
    due = {n: ending for n, ending in cluster.ending.items() if ending.save_at is not None and now >= ending.save_at}
    if due:
        saved = {name: replace(ending, save_at=None) for name, ending in due.items()}
        cluster = replace(cluster, ending=cluster.ending | saved)
        soon = [n for n, ending in cluster.ending.items() if ending.save_at is None and n in cluster.hosts]
        last = [w for name in soon for w in workers_on(cluster, name)]
        if cluster.active is not None and not state_lives(cluster, last):
            reason = f"only hosts that end hold the training state: {', '.join(soon)}"
            cluster = jobs.end(cluster, "stopped", reason, now, out)
    for name in [name for name, ending in cluster.ending.items() if now >= ending.at]:
        cluster = host_lifecycle.forget_end(cluster, name)
        cluster = _remove_host(cluster, ev.HostRemoved(name, now=True, by="its deadline"), now, out)
    return cluster


def restart_worker(cluster: ClusterState, w: WorkerId, by: str, now: float, out: Commands) -> ClusterState:
    """Replace a worker, which does not count as a failure. A worker that alone holds the training state is kept."""
    if cluster.stopping or w in cluster.stopped:
        return cluster
    if alone_holds_state(cluster, w):
        text = f"{by}: {w} is not restarted, as it alone holds the training state"
        out.append(cmd.Record("order-refused", text, host=w.host, worker=str(w)))
        return cluster
    return losses.replace_worker(cluster, w, f"{w} was restarted by {by}", now, out, blameless=True)


def stop_job(cluster: ClusterState, job: str, reason: str, now: float, out: Commands) -> ClusterState:
    """End this job or script, if it is the present one."""
    if cluster.active is not None and cluster.active.name == job:
        return jobs.end(cluster, "stopped", reason, now, out)
    return script_job.stop(cluster, job, reason, now, out)
