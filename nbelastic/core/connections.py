"""Hosts whose connection to the driver has ended while their agents may run on, as over ssh.

Their workers then train on. But they receive no order, so such a host is lost as soon as the training breaks. A change that has begun
waits for it for some seconds, and a change that is only planned for a minute. A host without members has that minute too, but no change
waits for it, and no world is formed with its workers meanwhile.
"""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import arrivals, halts, host_lifecycle, losses, provisioning
from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.host_slots import with_host
from nbelastic.core.persistent import without_key
from nbelastic.core.reasons import Reason
from nbelastic.core.state import ClusterState, Disconnected, HostPhase, Stage
from nbelastic.protocol.cluster_limits import NEVER
from nbelastic.protocol.connection_events import EnvironmentReported, HostDisconnected, HostReconnected

BLIP = 3.0  # seconds in which a host that is only just needed may be reached again
NEWS = "; nbelastic opens another one"
REDIALS = "; it opens another one if it lives"


def changed(
    cluster: ClusterState, event: HostDisconnected | HostReconnected | EnvironmentReported, now: float, out: Commands
) -> ClusterState:
    """Note that a host receives no orders, that it does so again, or that it cannot start workers yet."""
    match event:
        case HostDisconnected():
            return _disconnected(cluster, event, now, out)
        case HostReconnected(host=name):
            return _reconnected(cluster, name, now, out)
        case EnvironmentReported():
            return host_lifecycle.environment_reported(cluster, event, now, out)


def _disconnected(cluster: ClusterState, event: HostDisconnected, now: float, out: Commands) -> ClusterState:
    """A host that is not up yet, and cannot open another connection itself, is lost."""
    name, reason, news = event.host, event.reason, REDIALS if event.redials else NEWS
    host = cluster.hosts.get(name)
    if host is None or host.phase is HostPhase.LOST or (event.redials and not host.is_up):
        return cluster
    if not host.is_up:
        return losses.exclude_host(cluster, name, reason, now, out, kind="host-lost")
    if name not in cluster.disconnected:
        text = f"{name}: {reason}{news}" + ("" if event.redials else ", and its workers go on")
        out.append(cmd.Record("host-disconnected", text, host=name))
    since = cluster.disconnected[name].since if name in cluster.disconnected else now
    cluster = with_host(cluster, replace(host, reason=f"{reason}{news}"))
    return replace(cluster, disconnected={**cluster.disconnected, name: Disconnected(since, reason)})


def _reconnected(cluster: ClusterState, name: str, now: float, out: Commands) -> ClusterState:
    known = cluster.disconnected.get(name)
    if known is None:
        return cluster
    text = f"{name} can be reached again, after {now - known.since:.0f} s"
    out.append(cmd.Record("host-reconnected", text, host=name))
    cluster = replace(cluster, disconnected=without_key(cluster.disconnected, name))
    cluster = with_host(cluster, replace(cluster.hosts[name], reason=""))
    return provisioning.provision(cluster, now, out)  # a worker may have died there meanwhile


def progress(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Give up disconnected hosts without which the job cannot go on, or for which a change has waited too long."""
    for name, known in list(cluster.disconnected.items()):
        if name in cluster.disconnected and now >= known.since + _patience(cluster, name):
            cluster = losses.exclude_host(cluster, name, known.reason, now, out, kind="host-lost")
    return cluster


def deadline(cluster: ClusterState) -> float:
    """When the first disconnected host is given up."""
    ends = (known.since + _patience(cluster, name) for name, known in cluster.disconnected.items())
    return min(ends, default=NEVER)


def _patience(cluster: ClusterState, name: str) -> float:
    """Seconds for which the job can do without the connection to this host."""
    script = cluster.active_script
    if script is not None:
        return BLIP if any(map(script.assigns, cluster.disconnected)) and script.failures else NEVER
    if cluster.active is None or cluster.stands_still:
        return NEVER
    reconnect = cluster.limits.timeouts.reconnect
    if name not in _needed(cluster):
        return reconnect  # programs that have not trained yet need no order
    if cluster.stage is Stage.RUNNING and not cluster.suspects:
        return reconnect if _is_change_wanted(cluster) else NEVER
    return 0.0 if cluster.stage is Stage.GATHERING or cluster.suspects else BLIP  # 0: the host may be the cause


def _needed(cluster: ClusterState) -> set[str]:
    """The disconnected hosts with a member of the world, or of the one to which all change over."""
    prepared = cluster.next_formation if cluster.stage is Stage.LEAVING else None
    joining = prepared.members if prepared is not None else ()
    return {w.host for ids in (cluster.members, joining) for w in ids} & cluster.disconnected.keys()


def delays_change(cluster: ClusterState) -> bool:
    """Whether the running world has to halt or change, and a host of its members receives no orders."""
    return bool(cluster.disconnected) and _is_change_wanted(cluster) and bool(_needed(cluster))


def _is_change_wanted(cluster: ClusterState) -> bool:
    """Whether the running world has to halt or change, for which each member needs an order."""
    room = len(cluster.members) - len(cluster.leaving) < cluster.limits.most
    newcomers = room and not arrivals.reachable_newcomers(cluster) <= cluster.held_back.keys()
    return bool(cluster.leaving) or newcomers or halts.is_wanted(cluster)


def wait(cluster: ClusterState) -> tuple[Reason, float]:
    """The reason for which a change waits, and until when."""
    needed = sorted(_needed(cluster))
    until = min(cluster.disconnected[name].since for name in needed) + cluster.limits.timeouts.reconnect
    return Reason("disconnected", names=tuple(needed)), until
