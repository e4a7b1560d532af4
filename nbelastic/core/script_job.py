"""A script as the cluster's job: its worker group follows the hosts, and its nodes learn what they wait for.

One node is on each host that is up. *External nodes* are torchruns that users have started in terminals.
`script_rounds` decides which nodes are in a round, and when all restart.
"""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import host_admission, host_lifecycle, jobs, script_rounds
from nbelastic.core import script_commands as scmd
from nbelastic.core.commands import Commands
from nbelastic.core.persistent import without_key
from nbelastic.core.reasons import Reason
from nbelastic.core.script_group import Group, Node, Stage
from nbelastic.core.state import ClusterState, ExternalNode, HostPhase
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.system.addresses import address_of, is_loopback

CLOSED = "the cluster was stopped: it is closed"
AWAY = (HostPhase.LOST, HostPhase.STARTING)


def submit(cluster: ClusterState, event: sev.ScriptSubmitted, now: float, out: Commands) -> ClusterState:
    """Begin a script. One of an earlier driver begins again."""
    if cluster.script is not None and cluster.script.job == event.job:
        return cluster
    problem = jobs.refusal(cluster)
    if problem:
        out.append(cmd.EndJob(event.job, *problem, ()))
        return cluster
    how = "begins again, as its driver was lost" if event.round else "was submitted"
    out.append(cmd.Record("job-started", f"{event.job} {how}: {event.target}"))
    cluster = replace(cluster, script=Group(event.job, event.terms, cluster.limits, round=event.round))
    cluster = _update_hosts(cluster, now, out)
    for external in tuple(cluster.external_nodes.values()):
        if external.ready is not None:
            cluster = node_ready(cluster, external.ready, now, out)
    return cluster


def node_event(cluster: ClusterState, event: ev.Event, now: float, out: Commands) -> ClusterState:
    """Handle an event of a node."""
    cluster = _advance(cluster, event, now, out)
    if isinstance(event, sev.NodeLeft) and event.host in cluster.ending_nodes:
        cluster = _node_ended(cluster, event.host, out)
    if isinstance(event, sev.NodeLeft) and event.host in cluster.external_nodes:
        cluster = replace(cluster, external_nodes=without_key(cluster.external_nodes, event.host))
    return cluster


def count_nodes_as_ended(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Wait no longer for nodes that had to end their workers by now."""
    for host in [host for host, until in cluster.ending_nodes.items() if now >= until]:
        cluster = _node_ended(cluster, host, out)
    return cluster


def _node_ended(cluster: ClusterState, host: str, out: Commands) -> ClusterState:
    cluster = replace(cluster, ending_nodes=without_key(cluster.ending_nodes, host))
    return host_lifecycle.remove_if_empty(cluster, host, out)


def external_node_joined(
    cluster: ClusterState, event: sev.ExternalNodeJoined, now: float, out: Commands
) -> ClusterState:
    """A torchrun in a terminal waits. It replaces another process of the same name."""
    if event.host in cluster.hosts:
        out.append(scmd.EndNode(event.host, f"a host of the cluster is named {event.host} already"))
        return cluster
    known = cluster.external_nodes.get(event.host)
    if known is not None and known.pid != event.pid:
        cluster = node_event(cluster, sev.NodeLeft(event.host, "another process replaced it", broken=True), now, out)
    if event.host not in cluster.external_nodes:
        external = ExternalNode(event.pid, event.on_driver_machine)
        cluster = replace(cluster, external_nodes={**cluster.external_nodes, event.host: external})
        out.append(cmd.Record("host-up", f"{event.host} was started in a terminal", host=event.host))
    out.append(scmd.ReportWaiting(event.host, _reason(cluster)))
    return cluster


def node_ready(cluster: ClusterState, event: sev.NodeReady, now: float, out: Commands) -> ClusterState:
    """A node waits for a round. Answer with its round, with the reason to wait, or with the address for its store."""
    host = event.host
    if event.external:
        external = cluster.external_nodes.get(host)
        if external is None:
            out.append(scmd.EndNode(host, "the cluster no longer knows it"))
            return cluster
        if external.ready != event:
            cluster = replace(cluster, external_nodes={**cluster.external_nodes, host: replace(external, ready=event)})
    move = _move_command(cluster, host, event.store, external=event.external)
    if move is not None:
        out.append(move)
        return cluster
    if cluster.stopping:
        return _end_external(cluster, (host,), CLOSED, out)
    before = cluster.active_script
    if before is None or (event.external and event.job not in ("", before.job)):
        ended = scmd.EndNode(host, "its script has ended")
        out.append(scmd.ReportWaiting(host, _reason(cluster)) if event.external else ended)
        return cluster
    cluster = _advance(cluster, event, now, out)
    group = cluster.active_script
    if group is None or group.round != before.round:
        return cluster
    if group.stage is Stage.RUNNING and event.round < group.round and group.assigns(host):
        out.append(scmd.RepeatRound(host))
    elif event.external and host in group.nodes and group.nodes[host].ready:
        full = group.stage is Stage.RUNNING and group.size + event.workers > group.limits.most
        reason = Reason("full", group.size, int(group.limits.most)) if full else group.reason
        out.append(scmd.ReportWaiting(host, reason, full))
    return cluster


def progress(before: ClusterState, cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Let the group follow the hosts and the time."""
    if cluster.stopping and not before.stopping:
        cluster = _close(cluster, now, out)
    group = cluster.active_script
    if group is None:
        return cluster
    if (
        cluster.hosts is not before.hosts
        or cluster.limits is not before.limits
        or cluster.external_address != before.external_address
    ):
        cluster = _update_hosts(_update_stores(cluster, now, out), now, out)
        group = cluster.active_script
    is_due = group is not None and now >= script_rounds.deadline(group)
    return _advance(cluster, sev.Ticked(), now, out) if is_due else cluster


def stop(cluster: ClusterState, job: str, reason: str, now: float, out: Commands) -> ClusterState:
    """Stop the script, if it is this job."""
    group = cluster.active_script
    return _advance(cluster, sev.ScriptStopped(reason), now, out) if group is not None and group.job == job else cluster


def remove(cluster: ClusterState, event: ev.HostRemoved, out: Commands) -> ClusterState:
    """Let an external node leave: its torchrun ends well."""
    if event.name not in cluster.external_nodes:
        return cluster
    return _end_external(cluster, (event.name,), f"removed by {event.by}", out, error=False)


def _close(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Stop the script and all external nodes with the cluster."""
    cluster = _end_external(cluster, tuple(cluster.external_nodes), CLOSED, out)
    return _advance(cluster, sev.ScriptStopped(f"the cluster was stopped: {cluster.stopping}"), now, out)


def _advance(cluster: ClusterState, event: ev.Event, now: float, out: Commands) -> ClusterState:
    if cluster.script is None:
        return cluster
    group, commands = script_rounds.advance(cluster.script, event, now)
    out.extend(commands)
    before, end_by = cluster.script.nodes, now + group.terms.leave
    if group != cluster.script:
        cluster = replace(cluster, script=group)
    for command in commands:
        match command:
            case scmd.StartNode(host=host) if host in cluster.ending_nodes:  # it was added again
                cluster = replace(cluster, ending_nodes=without_key(cluster.ending_nodes, host))
            case scmd.EndNode(host=host):
                cluster = _clear_ready(cluster, (host,))
                if host in cluster.hosts and host in before and before[host].has_workers:
                    cluster = replace(cluster, ending_nodes={host: end_by, **cluster.ending_nodes})
            case scmd.FormRound(assignments=assignments):
                cluster = _clear_ready(cluster, tuple(assignment.host for assignment in assignments))
    return cluster


def _end_external(
    cluster: ClusterState, external_nodes: tuple[str, ...], reason: str, out: Commands, *, error: bool = True
) -> ClusterState:
    out.extend(scmd.EndNode(host, reason, error) for host in external_nodes)
    return _clear_ready(cluster, external_nodes)


def _clear_ready(cluster: ClusterState, hosts: tuple[str, ...]) -> ClusterState:
    """Forget that these nodes wait: they are in a round or end, though that may take a while."""
    known = cluster.external_nodes
    cleared = {
        host: replace(known[host], ready=None) for host in hosts if host in known and known[host].ready is not None
    }
    return replace(cluster, external_nodes=known | cleared) if cleared else cluster


def _reason(cluster: ClusterState) -> Reason | None:
    """Why an external node waits; None: there is no script."""
    group = cluster.active_script
    return group.reason if group is not None else None


def _update_hosts(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    group = cluster.script
    assert group is not None
    up = (host.spec for host in cluster.hosts.values() if host.phase is HostPhase.UP)
    found = tuple((spec.name, spec.slots) for spec in up)
    lost = tuple(name for name in group.nodes if name in cluster.hosts and cluster.hosts[name].phase in AWAY)
    changed = sev.HostsChanged(found, cluster.limits, lost)
    return _advance(cluster, changed, now, out) if changed != group.hosts_seen else cluster


def _update_stores(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Forget stores that nodes offered at addresses that they no longer have. They offer new ones."""
    nodes: dict[str, Node] = cluster.script.nodes if cluster.script is not None else {}
    for host, node in nodes.items():
        if node.ready and _move_command(cluster, host, node.store, external=node.external) is not None:
            cluster = _advance(cluster, sev.NodeMoved(host), now, out)
    return cluster


def _move_command(cluster: ClusterState, host: str, store: str, *, external: bool) -> scmd.MoveNode | None:
    """The command that moves a node's store; None: it is at the right address."""
    address = address_of(store)
    if external:  # a local one offers a loopback address until the cluster is wide
        driver_address = cluster.driver_address or cluster.external_address
        known = cluster.external_nodes.get(host)
        is_moved = known is not None and known.is_local and is_loopback(address) and not is_loopback(driver_address)
        return (
            scmd.MoveNode(host, driver_address)
            if is_moved and driver_address and host_admission.wide(cluster)
            else None
        )
    home = cluster.hosts.get(host)
    if home is None or home.address in ("", address):
        return None
    interface = next((i.name for i in home.addresses if i.address == home.address), "")
    return scmd.MoveNode(host, home.address, interface)
