"""Which hosts of a world do not reach one another, though the driver hears them all.

Their probers are asked when a world stands still, and when connections broke though every worker lives. A pair that twice in
a row did not answer one another, one way or the other, is cut: one of the two is left out, treated as a lost host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import combinations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import host_slots, losses
from nbelastic.core.host_admission import PROBE_PATIENCE
from nbelastic.core.state import ClusterState, HostPhase, PartitionCheck
from nbelastic.protocol import events as ev
from nbelastic.system.addresses import is_loopback

Commands = list[cmd.Command]
Pair = tuple[str, str]
FEW = 8  # hosts; up to so many are all probed with one another, of more only neighbours, and rank 0's host with all
MANY = 16  # hosts; of more that could not be joined only so many are all probed with one another
TWICE = 2  # rounds in a row in which two hosts do not reach one another: then one of them is left out


def begin(cluster: ClusterState, now: float, out: Commands, among: Collection[str] = ()) -> ClusterState:
    """Ask the members' hosts, unless they are being asked or are all on this machine. Those `among` try all one another."""
    if cluster.partition_check.pairs:
        return cluster
    names = tuple(name for name in dict.fromkeys(w.host for w in cluster.members) if _is_reachable(cluster, name))
    told_apart = [name for name in sorted(among) if _is_reachable(cluster, name)][:MANY]
    pairs = frozenset(_pairs(names)).union(_pair(*two) for two in combinations(told_apart, 2))
    if not pairs:
        return cluster
    number = cluster.last_probe + 1
    probes = [probe for one, other in sorted(pairs) for probe in ((one, other), (other, one))]
    for prober, target in probes:
        host = cluster.hosts[target]
        out.append(cmd.Probe(prober, target, (host.address,), host.port, number))
    awaited, until = frozenset(probes), now + PROBE_PATIENCE
    mesh = replace(
        cluster.partition_check,
        number=number,
        until=until,
        awaited=awaited,
        pairs=pairs,
        fully_probed=tuple(told_apart),
    )
    return replace(cluster, last_probe=number, partition_check=mesh)


def probed(cluster: ClusterState, event: ev.Probed) -> ClusterState:
    """One more answer in the present round."""
    mesh, probe, host = cluster.partition_check, (event.host, event.target), cluster.hosts.get(event.target)
    if event.number != mesh.number or probe not in mesh.awaited:
        return cluster
    cut = mesh.unreached if host is not None and host.address in event.reached else mesh.unreached | {_pair(*probe)}
    return replace(cluster, partition_check=replace(mesh, awaited=mesh.awaited - {probe}, unreached=cut))


def progress(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """A round that is complete, or had its time, is judged; after a cut there is another one at once."""
    mesh = cluster.partition_check
    if cluster.active is None:
        return replace(cluster, partition_check=PartitionCheck())
    if mesh.awaited and now < mesh.until:
        return cluster
    silent = {_pair(*probe) for probe in mesh.awaited}  # the driver does not hear them either: that says nothing
    failed = {pair: count for pair, count in mesh.failed_rounds.items() if pair in silent}
    cut = {pair for pair in mesh.unreached - silent if all(_is_reachable(cluster, name) for name in pair)}
    failed |= {pair: mesh.failed_rounds.get(pair, 0) + 1 for pair in cut}
    cluster = replace(cluster, partition_check=PartitionCheck(failed_rounds=failed))
    broken = {pair for pair in cut if failed[pair] >= TWICE}
    if broken:
        return _exclude_hosts(replace(cluster, partition_check=PartitionCheck()), mesh.pairs, broken, now, out)
    return begin(cluster, now, out, mesh.fully_probed) if cut else cluster


def _is_reachable(cluster: ClusterState, name: str) -> bool:
    """Other machines may reach it."""
    host = cluster.hosts.get(name)
    if host is None or host.phase not in (HostPhase.UP, HostPhase.DRAINING):
        return False
    return bool(host.port and host.address) and not is_loopback(host.address)


def _pair(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


def _pairs(names: tuple[str, ...]) -> list[Pair]:
    if len(names) <= FEW:
        return [_pair(one, other) for i, one in enumerate(names) for other in names[:i]]
    ring = [_pair(name, names[i - 1]) for i, name in enumerate(names)]
    return ring + [_pair(names[0], name) for name in names[1:]]


def _exclude_hosts(
    cluster: ClusterState, pairs: frozenset[Pair], broken: set[Pair], now: float, out: Commands
) -> ClusterState:
    """As few hosts as possible leave, so that those who stay reach one another."""
    workers = Counter(w.host for w in cluster.members)
    tried = Counter(name for pair in pairs for name in pair)
    while broken:
        counts = Counter(name for pair in broken for name in pair)
        name = max(counts, key=lambda n: (counts[n], -workers[n], cluster.hosts[n].joined))
        rivals = [n for n in counts if n != name and counts[n] == counts[name]]
        if not rivals:
            why = f"reaches {tried[name] - counts[name]} of {tried[name]} hosts"
        elif all(workers[n] > workers[name] for n in rivals):
            why = "has fewer workers"
        else:
            why = "is younger"
        others = sorted(other for pair in broken if name in pair for other in pair if other != name)
        text = f"{name} and {', '.join(others)} do not reach one another; {name} is left out, as it {why}"
        cluster = host_slots.with_host(cluster, replace(cluster.hosts[name], unreached_hosts=tuple(others)))
        cluster = losses.exclude_host(cluster, name, text, now, out, kind="host-unreachable")
        broken = {pair for pair in broken if name not in pair}
    return cluster
