"""Which hosts of a world do not reach one another, though the driver reaches them all.

Their agents probe one another when no commit is made, and when connections broke though every worker lives. If two
hosts did not reach one another in two rounds in a row, one of them is left out, like a lost host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import combinations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import losses
from nbelastic.core.commands import Commands
from nbelastic.core.host_slots import with_host
from nbelastic.core.probes import PartitionCheck
from nbelastic.core.state import ClusterState
from nbelastic.protocol import events as ev
from nbelastic.system.addresses import is_loopback

Pair = tuple[str, str]
FEW = 8  # hosts of which each pair is probed; of more, only neighbours, and each with rank 0's host
MANY = 16  # suspected hosts of which each pair is probed
MOST_FAILED_ROUNDS = 2  # in a row, of a pair; then one of the two hosts is left out


def begin(cluster: ClusterState, now: float, out: Commands, suspected: Collection[str] = ()) -> ClusterState:
    """Let the members' hosts probe one another, unless they do so already or all are on this machine.

    Of the hosts in `suspected` each pair is probed.
    """
    if cluster.partition_check.pairs:
        return cluster
    names = tuple(name for name in dict.fromkeys(w.host for w in cluster.members) if _is_reachable(cluster, name))
    chosen = [name for name in sorted(suspected) if _is_reachable(cluster, name)][:MANY]
    pairs = frozenset(_pairs(names)).union(_pair(*two) for two in combinations(chosen, 2))
    if not pairs:
        return cluster
    number = cluster.last_probe + 1
    probes = [probe for one, other in sorted(pairs) for probe in ((one, other), (other, one))]
    for prober, target in probes:
        host = cluster.hosts[target]
        out.append(cmd.Probe(prober, target, (host.address,), host.port, number))
    awaited, until = frozenset(probes), now + cluster.limits.timeouts.probe
    check = replace(cluster.partition_check, number=number, until=until, awaited=awaited)
    check = replace(check, pairs=pairs, fully_probed=tuple(chosen))
    return replace(cluster, last_probe=number, partition_check=check)


def probed(cluster: ClusterState, event: ev.Probed) -> ClusterState:
    """Note the answer to a probe of the present round."""
    check, probe, host = cluster.partition_check, (event.host, event.target), cluster.hosts.get(event.target)
    if event.number != check.number or probe not in check.awaited:
        return cluster
    is_reached = host is not None and host.address in event.reached
    unreached = check.unreached if is_reached else check.unreached | {_pair(*probe)}
    return replace(cluster, partition_check=replace(check, awaited=check.awaited - {probe}, unreached=unreached))


def progress(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Judge a round that is complete, or whose time is over. Unreached pairs are probed once more."""
    check = cluster.partition_check
    if cluster.active is None:
        return replace(cluster, partition_check=PartitionCheck())
    if check.awaited and now < check.until:
        return cluster
    unanswered = {_pair(*probe) for probe in check.awaited}  # the driver has no answer: the cause is unknown
    failed = {pair: count for pair, count in check.failed_rounds.items() if pair in unanswered}
    unreached = {pair for pair in check.unreached - unanswered if all(_is_reachable(cluster, name) for name in pair)}
    failed |= {pair: check.failed_rounds.get(pair, 0) + 1 for pair in unreached}
    cluster = replace(cluster, partition_check=PartitionCheck(failed_rounds=failed))
    broken = {pair for pair in unreached if failed[pair] >= MOST_FAILED_ROUNDS}
    if broken:
        return _exclude_hosts(replace(cluster, partition_check=PartitionCheck()), check.pairs, broken, now, out)
    return begin(cluster, now, out, check.fully_probed) if unreached else cluster


def _is_reachable(cluster: ClusterState, name: str) -> bool:
    """Whether other machines may reach its prober."""
    host = cluster.hosts.get(name)
    return host is not None and host.is_up and bool(host.port and host.address) and not is_loopback(host.address)


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
    """Exclude as few hosts as possible, so that the others reach one another."""
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
        cluster = with_host(cluster, replace(cluster.hosts[name], unreached_hosts=tuple(others)))
        cluster = losses.exclude_host(cluster, name, text, now, out, kind="host-unreachable")
        broken = {pair for pair in broken if name not in pair}
    return cluster
