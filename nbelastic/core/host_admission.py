"""Which hosts may be used: a host of another machine is admitted only if it and its partners reach one another.

While all hosts have loopback addresses, nothing is probed. The cluster becomes *wide* with the first other host, or
when terminals of other machines are allowed. Hosts with loopback addresses then move to external ones.

Before a worker starts on a new host, the host and its partners probe one another. Partners are the hosts that were
admitted first and last, which makes a ring, and every host of a member: one that does not reach them all would block a
training. That is the ring of Horovod's driver and task services without its barrier. Hosts are probed side by side;
one that fails is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import host_lifecycle, losses
from nbelastic.core.commands import Commands
from nbelastic.core.host_slots import with_host
from nbelastic.core.probes import Admission
from nbelastic.core.state import ClusterState, Host, HostPhase
from nbelastic.protocol import events as ev
from nbelastic.system.addresses import is_loopback

AT_ONCE = 32  # partners in one round of probes
NAMED = 3  # hosts in a text


def external_addresses(host: Host) -> tuple[str, ...]:
    """The addresses at which other machines may reach it, in its order of preference."""
    return tuple(interface.address for interface in host.addresses if not is_loopback(interface.address))


def agent_ready(cluster: ClusterState, event: ev.AgentReady, now: float, out: Commands) -> ClusterState:
    """The agent of a starting host has connected: use the host, refuse it, or probe its network first."""
    name, cluster = event.host, replace(cluster, driver_address=event.driver_address or cluster.driver_address)
    host = cluster.hosts.get(name)
    if host is None or host.phase is not HostPhase.STARTING or name in cluster.probing:
        return cluster
    if event.problem:
        return losses.exclude_host(cluster, name, event.problem, now, out, kind="host-refused")
    host = replace(host, addresses=event.addresses, port=event.port, address="", agreed_addresses=(), moved_at=0.0)
    host = host_lifecycle.with_gpus(host, event.gpus)
    if not event.addresses:
        return host_lifecycle.admit(cluster, host, f"{name} is up", now, out)
    first = event.addresses[0].address
    if is_loopback(first) and not wide(cluster):
        return host_lifecycle.admit(cluster, replace(host, address=first), f"{name} is up", now, out)
    return _begin(widen(cluster, now, out), host, now, out)


def wide(cluster: ClusterState) -> bool:
    """Whether hosts or terminals of other machines may take part. O(hosts)"""
    return bool(cluster.external_address) or any(
        host.address and not is_loopback(host.address) for host in cluster.hosts.values() if host.is_up
    )


def external_access_opened(cluster: ClusterState, address: str, now: float, out: Commands) -> ClusterState:
    """Terminals of other machines may connect at `address`, so hosts here need addresses that these reach."""
    return widen(replace(cluster, external_address=cluster.external_address or address), now, out)


def probed(cluster: ClusterState, event: ev.Probed) -> ClusterState:
    """Note the answers to a probe. An answer to an older round is dropped."""
    probe = (event.host, event.target)
    name = next((n for n in probe if n in cluster.probing and cluster.probing[n].number == event.number), "")
    admission = cluster.probing.get(name)
    if admission is None:
        return cluster
    answers = {**admission.answers, probe: event.reached}
    admission = replace(admission, awaited=admission.awaited - {probe}, answers=answers)
    return replace(cluster, probing={**cluster.probing, name: admission})


def progress(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Admit or exclude hosts whose probes have ended. A host that has lost a partner is probed again."""
    for name in tuple(cluster.probing):
        admission = cluster.probing.get(name)
        if admission is None:
            continue
        if not all(partner in cluster.hosts and cluster.hosts[partner].is_up for partner in admission.partners):
            cluster = _begin(cluster, cluster.hosts[name], now, out)
        elif not admission.awaited or now >= admission.until:
            cluster = _decide(cluster, cluster.hosts[name], admission, now, out)
    return cluster


def widen(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Move hosts with loopback addresses to external ones. A host without any stays."""
    for host in cluster.hosts.values():
        others = _own_addresses(cluster, host)
        if others and is_loopback(host.address) and host.is_up:
            cluster = _move(cluster, host, others[0], now, out)
    return cluster


def _move(cluster: ClusterState, host: Host, address: str, now: float, out: Commands) -> ClusterState:
    interface = next(interface.name for interface in host.addresses if interface.address == address)
    out.append(cmd.Rehome(host.spec.name, address, interface))
    if host.is_up:
        text = f"{host.spec.name} is reached at {address} ({interface}) now, no longer at {host.address}"
        out.append(cmd.Record("host-moved", text, host=host.spec.name))
    return with_host(cluster, replace(host, address=address, moved_at=now))


def _partners(cluster: ClusterState, new_host: Host, passed: frozenset[str]) -> tuple[Host, ...]:
    """Hosts that the new host has to probe, without those that have `passed`. O(hosts + members)

    They are the hosts that were admitted last and first, those that it did not reach before, and all hosts of members.
    """
    up = [host for host in cluster.hosts.values() if host.address and host.is_up]
    up = [host for host in up if host.phase is HostPhase.UP] or up
    if not up:
        return ()
    by_age = sorted(up, key=lambda host: host.admitted)
    with_members = {w.host for w in cluster.members}
    chosen = [by_age[-1], by_age[0]]
    chosen += [host for host in by_age if host.spec.name in new_host.unreached_hosts]
    chosen += [host for host in by_age if host.spec.name in with_members]
    return tuple({host.spec.name: host for host in chosen if host.spec.name not in passed}.values())


def _own_addresses(cluster: ClusterState, host: Host) -> tuple[str, ...]:
    """The addresses at which others may reach it: first that of external access, if the host has it."""
    return tuple(sorted(external_addresses(host), key=lambda address: address != cluster.external_address))


def _known_addresses(host: Host) -> tuple[str, ...]:
    """The addresses at which all earlier probers have reached it; without any, all external ones."""
    return host.agreed_addresses or external_addresses(host)


def _begin(cluster: ClusterState, host: Host, now: float, out: Commands) -> ClusterState:
    """Probe the host's network, or admit it at once if it has no partners."""
    own = _own_addresses(cluster, host)
    if not own:
        reason = f"has no address but {host.addresses[0].address}, and the other hosts are on other machines"
        return losses.exclude_host(cluster, host.spec.name, reason, now, out, kind="host-unreachable")
    return _probe(cluster, host, own, now, out, passed=frozenset())


def _probe(
    cluster: ClusterState, host: Host, own: tuple[str, ...], now: float, out: Commands, *, passed: frozenset[str]
) -> ClusterState:
    """Begin a round of probes with partners that have not `passed` yet; without any, admit the host."""
    name, partners = host.spec.name, _partners(cluster, host, passed)[:AT_ONCE]
    if not partners:
        return _admit(cluster, host, own, now, out)
    number = cluster.last_probe + 1
    probes = [cmd.Probe(name, p.spec.name, _known_addresses(p), p.port, number) for p in partners]
    probes += [cmd.Probe(p.spec.name, name, own, host.port, number) for p in partners]
    probes = [probe for probe in probes if probe.addresses]
    out.extend(probes)
    names = tuple(p.spec.name for p in partners)
    awaited = frozenset((probe.host, probe.target) for probe in probes)
    admission = Admission(number, names, own, now + cluster.limits.timeouts.probe, awaited, passed=passed)
    cluster = with_host(cluster, replace(host, reason=f"its network is probed with {_listed(names)}"))
    return replace(cluster, last_probe=number, probing={**cluster.probing, name: admission})


def _listed(names: Sequence[str]) -> str:
    """All of a few names; of many the first three."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return " and ".join(names[:NAMED]) + more


def _decide(cluster: ClusterState, host: Host, admission: Admission, now: float, out: Commands) -> ClusterState:
    """End a round of probes: exclude the host, or probe it with further partners."""
    name = host.spec.name
    partners = [cluster.hosts[partner] for partner in admission.partners]
    own = admission.addresses
    for partner in partners:
        own = tuple(a for a in own if a in admission.answers.get((partner.spec.name, name), ()))
    common = {p.spec.name: _common_addresses(p, admission.answers.get((name, p.spec.name), ())) for p in partners}
    if not own or not all(common.values()):
        reason = _describe_failure(host, admission, partners, common, cluster.limits.timeouts.probe)
        return losses.exclude_host(cluster, name, reason, now, out, kind="host-unreachable")
    for partner_name, where in common.items():
        cluster = _agree_with_partner(cluster, cluster.hosts[partner_name], where, now, out)
    return _probe(cluster, host, own, now, out, passed=admission.passed.union(admission.partners))


def _common_addresses(partner: Host, reached: tuple[str, ...]) -> tuple[str, ...]:
    """The addresses of a partner that the new host and all earlier probers have reached."""
    return tuple(address for address in _known_addresses(partner) if address in reached)


def _agree_with_partner(
    cluster: ClusterState, partner: Host, addresses: tuple[str, ...], now: float, out: Commands
) -> ClusterState:
    """Restrict the partner to addresses that the new host reaches. If it has to move, all hosts of its machine move."""
    old_address = partner.address
    cluster = with_host(cluster, replace(partner, agreed_addresses=addresses))
    if old_address in addresses:
        return cluster
    for host in cluster.hosts.values():
        if host.address == old_address and addresses[0] in external_addresses(host) and host.is_up:
            cluster = _move(cluster, host, addresses[0], now, out)
    return cluster


def _admit(cluster: ClusterState, host: Host, agreed: tuple[str, ...], now: float, out: Commands) -> ClusterState:
    name, address = host.spec.name, agreed[0]
    host = replace(host, address=host.addresses[0].address, agreed_addresses=agreed, unreached_hosts=())
    if address != host.address:  # else its agent uses the first one by itself
        cluster = _move(cluster, host, address, now, out)
        host = cluster.hosts[name]
    return host_lifecycle.admit(cluster, host, f"{name} is up at {address}", now, out)


def _describe_failure(
    host: Host, admission: Admission, partners: list[Host], common: dict[str, tuple[str, ...]], seconds: float
) -> str:
    """Which host did not reach which within `seconds`, as text."""
    name, answers = host.spec.name, admission.answers
    names = [p.spec.name for p in partners]
    unanswered = sorted({prober for prober, _ in admission.awaited})
    if name in unanswered:
        return f"did not report within {seconds:g} s whether it reaches {_listed(names)}"
    if unanswered:
        return f"{_listed(unanswered)} did not report within {seconds:g} s whether {name} is reached"
    unreached = [f"{p.spec.name} at {p.address}" for p in partners if not common[p.spec.name]]
    if unreached:
        return f"reaches the driver but not its peers ({', '.join(unreached)})"
    for other in names:
        if not answers[other, name]:
            return f"is not reached by {other} at any of {', '.join(external_addresses(host))}"
    where = " and ".join(f"by {other} only at {', '.join(answers[other, name])}" for other in names)
    return f"is reached {where}"
