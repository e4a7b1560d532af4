"""How hosts are added, come up, drain, are lost and are removed."""

from __future__ import annotations

import itertools

from msgspec.structs import replace

from nbelastic.core import backoff, provisioning
from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.host_slots import with_host, with_slots, workers_on
from nbelastic.core.persistent import without_key
from nbelastic.core.state import ClusterState, Host, HostPhase, Slot
from nbelastic.core.state_holders import keeper
from nbelastic.protocol.connection_events import EnvironmentReported
from nbelastic.protocol.ids import Gpu, HostSpec

NAMES = 1000  # removed hosts whose highest incarnations are known one by one
REPLACES = "it takes the place of"
FORGOTTEN = ""  # the key for all other removed hosts: the highest incarnation of any of their workers


def add(cluster: ClusterState, spec: HostSpec, now: float, out: Commands, *, by: str, by_hand: bool) -> ClusterState:
    """Add a host. For a known one, set its number of slots, clear its failures and cancel its drain."""
    old = cluster.hosts.get(spec.name)
    spec = _following(spec, old)
    unused = Slot(incarnation=cluster.incarnations.get(spec.name, cluster.incarnations.get(FORGOTTEN, 0)))
    if old is None:
        out.append(cmd.Record("host-added", f"{spec.name} with {_slots(spec.slots)} by {by}", host=spec.name))
        out.append(cmd.StartAgent(spec))
        host = Host(spec, joined=cluster.hosts_joined, slots=(unused,) * spec.slots, since=now, by_hand=by_hand)
        return replace(cluster, hosts_joined=cluster.hosts_joined + 1, hosts={**cluster.hosts, spec.name: host})
    slots = tuple(replace(slot, failures=0, backoff_until=0.0, reason="") for slot in old.slots)
    slots += (unused,) * (spec.slots - len(slots))
    phase = HostPhase.UP if old.phase is HostPhase.DRAINING else old.phase
    reason = old.reason if spec.name in cluster.probing else ""
    host = replace(old, spec=spec, phase=phase, failures=0, lost_for=None, retry_at=0.0, by_hand=by_hand, reason=reason)
    out.append(cmd.Record("host-changed", f"{spec.name} has {_slots(spec.slots)} now, by {by}", host=spec.name))
    cluster = with_host(cluster, with_slots(host, slots))
    if spec.name in cluster.ending:
        out.append(cmd.CancelEnd(spec.name))
    kept = frozenset(w for w in cluster.leaving if w.host == spec.name and w.slot < spec.slots)
    cluster = replace(forget_end(cluster, spec.name), leaving=cluster.leaving - kept)
    surplus = [w for w in workers_on(cluster, spec.name) if w.slot >= spec.slots]
    return provisioning.drain_workers(cluster, surplus, now, out)


def add_successor(cluster: ClusterState, ending: Host, by: str, now: float, out: Commands) -> tuple[ClusterState, str]:
    """Add a host that takes the place of one that ends, `a.2` of `a`: at once, as its job may have to wait in a queue.

    After a back-off if that one has not been up for `healthy` seconds: the next one may end as soon. Returns its name, too.
    """
    name, _, number = ending.spec.name.rpartition(".")
    stem, first = (name, int(number) + 1) if name and number.isdecimal() else (ending.spec.name, 2)
    name = next(name for n in itertools.count(first) if (name := f"{stem}.{n}") not in cluster.hosts)
    failures, wait = backoff.host_backoff(cluster, ending, now)
    if ending.is_up and now - ending.since >= cluster.limits.healthy:
        failures, wait = 0, 0.0
    unused = Slot(incarnation=cluster.incarnations.get(name, cluster.incarnations.get(FORGOTTEN, 0)))
    host = Host(
        replace(ending.spec, name=name),
        joined=cluster.hosts_joined,
        slots=(unused,) * ending.spec.slots,
        since=now,
        phase=HostPhase.LOST,  # it is started like one that was lost
        reason=f"{REPLACES} {ending.spec.name}",
        failures=failures,
        retry_at=now + wait,
        by_hand=True,  # no discovery lists it
    )
    text = f"{name} with {_slots(ending.spec.slots)} in place of {ending.spec.name}, by {by}"
    text += f", in {wait:g} s" if wait else ""
    out.append(cmd.Record("host-added", text, host=name))
    return replace(cluster, hosts_joined=cluster.hosts_joined + 1, hosts={**cluster.hosts, name: host}), name


def discovered(cluster: ClusterState, specs: tuple[HostSpec, ...], now: float, out: Commands) -> ClusterState:
    """Follow the hosts that discovery lists. Hosts that a client added or removed stay as the client wanted."""
    listed = {spec.name for spec in specs}
    cluster = replace(cluster, removed_hosts=cluster.removed_hosts & listed)
    for name, host in list(cluster.hosts.items()):
        if name not in listed and not host.by_hand and host.phase is not HostPhase.DRAINING:
            cluster = drain(cluster, name, "at the next commit", "discovery", out)
            cluster = provisioning.drain_workers(cluster, workers_on(cluster, name), now, out)
            cluster = remove_if_empty(cluster, name, out)
    for spec in specs:
        old = cluster.hosts.get(spec.name)
        same = old is not None and old.spec == _following(spec, old) and old.phase is not HostPhase.DRAINING
        if spec.name in cluster.removed_hosts or same or (old is not None and old.by_hand):
            continue
        cluster = add(cluster, spec, now, out, by="discovery", by_hand=False)
    return cluster


def note_removed(cluster: ClusterState, name: str) -> ClusterState:
    """A client or an agent wants the host removed. Of many removed ones, those that were removed long ago are forgotten."""
    names = cluster.removed_hosts | {name}
    if len(names) > NAMES:  # a discovery forgets those that it does not list; without one, nothing else would
        names &= {*cluster.hosts, *cluster.incarnations}
    return replace(cluster, removed_hosts=names)


def with_gpus(host: Host, gpus: tuple[Gpu, ...]) -> Host:
    """The host with the GPUs that its agent has found. If no number of slots was given, it has as many as GPUs."""
    host = replace(host, gpus=gpus)
    if not gpus or not host.spec.follows_gpus:
        return host
    newest = max(slot.incarnation for slot in host.slots)
    slots = host.slots + (Slot(incarnation=newest),) * (len(gpus) - len(host.slots))
    return with_slots(replace(host, spec=replace(host.spec, slots=len(gpus))), slots)


def _following(spec: HostSpec, known: Host | None) -> HostSpec:
    """The host as it was named, with a slot per GPU if no number was given and its GPUs are known."""
    return replace(spec, slots=len(known.gpus)) if spec.follows_gpus and known is not None and known.gpus else spec


def drain(cluster: ClusterState, name: str, how: str, by: str, out: Commands) -> ClusterState:
    """Start no more workers on the host. The caller lets its workers leave."""
    out.append(cmd.Record("host-removed", f"{name} will leave {how}, by {by}", host=name))
    return with_host(cluster, replace(cluster.hosts[name], phase=HostPhase.DRAINING, reason="draining"))


def remove_if_empty(cluster: ClusterState, name: str, out: Commands) -> ClusterState:
    """Remove a draining host on which no worker lives."""
    host = cluster.hosts.get(name)
    if host is None or host.phase is not HostPhase.DRAINING or cluster.stopping or workers_on(cluster, name):
        return cluster
    if name == keeper(cluster) or has_script_workers(cluster, name):
        return cluster
    out.append(cmd.StopAgent(name))
    out.append(cmd.Record("host-gone", f"{name} has left", host=name))
    return _remove(cluster, name)


def has_script_workers(cluster: ClusterState, name: str) -> bool:
    """Whether workers of a script run on the host. They get time to save what they have."""
    node = cluster.active_script.nodes.get(name) if cluster.active_script is not None else None
    return name in cluster.ending_nodes or (node is not None and node.has_workers)


def environment_reported(cluster: ClusterState, event: EnvironmentReported, now: float, out: Commands) -> ClusterState:
    """The agent of a starting host makes an environment for the requirements, for which it has more time."""
    name, host = event.host, cluster.hosts.get(event.host)
    if host is None or host.phase is not HostPhase.STARTING or name in cluster.probing:
        return cluster
    if not host.prepares_by and not backoff.waits_longest(cluster, host.failures):
        out.append(cmd.Record("environment-begun", f"{name} makes an environment for the requirements", host=name))
    until = host.prepares_by or now + cluster.limits.timeouts.environment
    host = replace(host, prepares_by=until, reason=f"makes an environment for the requirements: {event.text}")
    return replace(with_host(cluster, host), wake_at=min(cluster.wake_at, until))


def admit(cluster: ClusterState, host: Host, text: str, now: float, out: Commands) -> ClusterState:
    """Use the host: start its workers."""
    name, number = host.spec.name, cluster.hosts_admitted + 1
    out.append(cmd.Record("host-up", text, host=name))
    host = replace(host, phase=HostPhase.UP, reason="", since=now, admitted=number)
    cluster = with_host(_stop_probing(cluster, name), host)
    return provisioning.provision(replace(cluster, hosts_admitted=number), now, out)


def agent_lost(
    cluster: ClusterState, name: str, reason: str, now: float, out: Commands, *, kind: str = "host-lost"
) -> ClusterState:
    """Handle the loss of a host's agent. The host is tried again after a back-off; a draining one is removed.

    A host that is down for days is recorded until its back-off is at its longest, and later only for another reason.
    """
    host, cluster = cluster.hosts[name], _forget_agent(_stop_probing(cluster, name), name)
    if host.phase is HostPhase.DRAINING or name in cluster.ending:
        out.append(cmd.Record("host-gone", f"{name} has left ({reason})", host=name))
        return _remove(cluster, name)
    failures, wait = backoff.host_backoff(cluster, host, now)
    text = f"{name}: {reason}; tried again in {wait:g} s"
    is_new = reason != host.lost_for
    if host.is_up or host.lost_for is None or (is_new and kind != "host-lost"):
        out.append(cmd.Record(kind, text, host=name))
    elif is_new or wait != backoff.retry_wait(cluster, host.failures):
        out.append(cmd.Record("host-still-down", text, host=name))
    host = replace(host, phase=HostPhase.LOST, reason=reason, failures=failures, lost_for=reason, retry_at=now + wait)
    cluster = replace(cluster, wake_at=min(cluster.wake_at, host.retry_at))
    return with_host(cluster, with_slots(host, tuple(replace(slot, busy=False) for slot in host.slots)))


def _slots(count: int) -> str:
    return f"{count} slot{'s' if count != 1 else ''}"


def _remove(cluster: ClusterState, name: str) -> ClusterState:
    """Remove the host. Should it come back, its workers get higher incarnations."""
    cluster = forget_end(_forget_agent(_stop_probing(cluster, name), name), name)
    removed = {**without_key(cluster.incarnations, name), name: highest_incarnation(cluster, name)}
    if len(removed) > NAMES:
        oldest = next(n for n in removed if n != FORGOTTEN)
        removed[FORGOTTEN] = max(removed.pop(oldest), removed.get(FORGOTTEN, 0))
    return replace(cluster, hosts=without_key(cluster.hosts, name), incarnations=removed)


def highest_incarnation(cluster: ClusterState, name: str) -> int:
    """The highest incarnation of the host's workers so far, including slots that it no longer has."""
    return max([cluster.incarnations.get(name, 0), *(slot.incarnation for slot in cluster.hosts[name].slots)])


def _stop_probing(cluster: ClusterState, name: str) -> ClusterState:
    if name not in cluster.probing:
        return cluster
    return replace(cluster, probing=without_key(cluster.probing, name))


def _forget_agent(cluster: ClusterState, name: str) -> ClusterState:
    """Forget its connection, and its node, which has ended with it."""
    if name not in cluster.disconnected and name not in cluster.ending_nodes:
        return cluster
    return replace(
        cluster,
        disconnected=without_key(cluster.disconnected, name),
        ending_nodes=without_key(cluster.ending_nodes, name),
    )


def forget_end(cluster: ClusterState, name: str) -> ClusterState:
    """The host has ended, or was added again."""
    if name not in cluster.ending:
        return cluster
    return replace(cluster, ending=without_key(cluster.ending, name))
