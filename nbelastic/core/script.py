"""A script in the world: its group follows the cluster's hosts, and its nodes hear what they wait for.

A node is on each host that is up; others are *guests*: torchruns that have come by themselves, from terminals. Who is in a
round, and when all begin again, is decided in `rounds`.
"""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import jobs, networks, script_rounds
from nbelastic.core import script_commands as scmd
from nbelastic.core.reasons import Reason
from nbelastic.core.script_group import Group, Node, Stage
from nbelastic.core.state import Guest, HostPhase, World
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.system.addresses import address_of, is_loopback

Commands = list[cmd.Command]
CLOSED = "the cluster was stopped: it is closed"
AWAY = (HostPhase.LOST, HostPhase.STARTING)


def submit(world: World, event: sev.ScriptSubmitted, now: float, out: Commands) -> World:
    """A new script, or one of another driver, which begins again."""
    if world.script is not None and world.script.job == event.job:
        return world
    problem = jobs.refusal(world)
    if problem:
        out.append(cmd.EndJob(event.job, *problem, ()))
        return world
    how = "begins again, as its driver was lost" if event.round else "was submitted"
    out.append(cmd.Record("job-started", f"{event.job} {how}: {event.target}"))
    world = replace(world, script=Group(event.job, event.terms, world.limits, round=event.round))
    world = _look_at_hosts(world, now, out)
    for guest in tuple(world.guests.values()):
        if guest.ready is not None:
            world = ready(world, guest.ready, now, out)
    return world


def take(world: World, event: ev.Event, now: float, out: Commands) -> World:
    """Something has happened to a node."""
    world = _advance(world, event, now, out)
    if isinstance(event, sev.NodeLeft) and event.host in world.guests:
        world = replace(world, guests={host: guest for host, guest in world.guests.items() if host != event.host})
    return world


def came(world: World, event: sev.GuestCame, now: float, out: Commands) -> World:
    """A torchrun waits, in a terminal. Another process of the same name has left."""
    if event.host in world.hosts:
        out.append(scmd.EndNode(event.host, f"a host of the cluster is named {event.host} already"))
        return world
    known = world.guests.get(event.host)
    if known is not None and known.pid != event.pid:
        world = take(world, sev.NodeLeft(event.host, "another process came in its place", broken=True), now, out)
    if event.host not in world.guests:
        world = replace(world, guests={**world.guests, event.host: Guest(event.pid, event.here)})
        out.append(cmd.Record("host-up", f"{event.host} has come from a terminal", host=event.host))
    out.append(scmd.LetWait(event.host, _why_not(world)))
    return world


def ready(world: World, event: sev.NodeReady, now: float, out: Commands) -> World:
    """A node waits for a round, and hears which one it is in, what it waits for, or where its store is to be."""
    host = event.host
    if event.guest:
        guest = world.guests.get(host)
        if guest is None:
            out.append(scmd.EndNode(host, "the cluster does not know it any more"))
            return world
        if guest.ready != event:
            world = replace(world, guests={**world.guests, host: replace(guest, ready=event)})
    move = _move(world, host, event.store, guest=event.guest)
    if move is not None:
        out.append(move)
        return world
    if world.stopping:
        return _dismiss(world, (host,), CLOSED, out)
    before = world.active_script
    if before is None or (event.guest and event.job not in ("", before.job)):
        out.append(scmd.LetWait(host, _why_not(world)) if event.guest else scmd.EndNode(host, "its script has ended"))
        return world
    world = _advance(world, event, now, out)
    group = world.active_script
    if group is None or group.round != before.round:
        return world
    if group.stage is Stage.RUNNING and event.round < group.round and any(seat.host == host for seat in group.seats):
        out.append(scmd.RepeatRound(host))
    elif event.guest and host in group.nodes and group.nodes[host].ready:
        full = group.stage is Stage.RUNNING and group.size + event.workers > group.limits.most
        reason = Reason("full", group.size, int(group.limits.most)) if full else group.reason
        out.append(scmd.LetWait(host, reason, full))
    return world


def progress(before: World, world: World, now: float, out: Commands) -> World:
    """The group follows the hosts and the time."""
    if world.stopping and not before.stopping:
        world = _close(world, now, out)
    group = world.active_script
    if group is None:
        return world
    if world.hosts is not before.hosts or world.limits is not before.limits or world.door != before.door:
        world = _look_at_hosts(_look_at_stores(world, now, out), now, out)
        group = world.active_script
    return (
        _advance(world, sev.Passed(), now, out) if group is not None and now >= script_rounds.deadline(group) else world
    )


def stop(world: World, job: str, reason: str, now: float, out: Commands) -> World:
    """Somebody wants the script to end."""
    group = world.active_script
    return _advance(world, sev.ScriptStopped(reason), now, out) if group is not None and group.job == job else world


def remove(world: World, event: ev.HostRemoved, out: Commands) -> World:
    """Somebody wants a guest to leave: its torchrun ends well, and says so."""
    if event.name not in world.guests:
        return world
    return _dismiss(world, (event.name,), f"removed by {event.by}", out, error=False)


def _close(world: World, now: float, out: Commands) -> World:
    """The cluster is stopped."""
    world = _dismiss(world, tuple(world.guests), CLOSED, out)
    return _advance(world, sev.ScriptStopped(f"the cluster was stopped: {world.stopping}"), now, out)


def _advance(world: World, event: ev.Event, now: float, out: Commands) -> World:
    if world.script is None:
        return world
    group, commands = script_rounds.advance(world.script, event, now)
    out.extend(commands)
    if group != world.script:
        world = replace(world, script=group)
    for command in commands:
        match command:
            case scmd.EndNode(host=host):
                world = _no_more_ready(world, (host,))
            case scmd.FormRound(seats=seats):
                world = _no_more_ready(world, tuple(seat.host for seat in seats))
    return world


def _dismiss(world: World, guests: tuple[str, ...], reason: str, out: Commands, *, error: bool = True) -> World:
    out.extend(scmd.EndNode(host, reason, error) for host in guests)
    return _no_more_ready(world, guests)


def _no_more_ready(world: World, hosts: tuple[str, ...]) -> World:
    """What these have said is over: they are in a round, or end, though they may take a while for that."""
    waiting = [host for host in hosts if host in world.guests and world.guests[host].ready is not None]
    if not waiting:
        return world
    return replace(world, guests=world.guests | {host: replace(world.guests[host], ready=None) for host in waiting})


def _why_not(world: World) -> Reason | None:
    """Why a guest waits; None: there is no script."""
    group = world.active_script
    return group.reason if group is not None else None


def _look_at_hosts(world: World, now: float, out: Commands) -> World:
    group = world.script
    assert group is not None
    up = (host.spec for host in world.hosts.values() if host.phase is HostPhase.UP)
    found = tuple((spec.name, spec.slots) for spec in up)
    lost = tuple(name for name in group.nodes if name in world.hosts and world.hosts[name].phase in AWAY)
    seen = sev.HostsSeen(found, world.limits, lost)
    return _advance(world, seen, now, out) if seen != group.seen else world


def _look_at_stores(world: World, now: float, out: Commands) -> World:
    """What a node has offered where it no longer is, is not used. It hears of the move, and offers again."""
    nodes: dict[str, Node] = world.script.nodes if world.script is not None else {}
    for host, node in nodes.items():
        if node.ready and _move(world, host, node.store, guest=node.guest) is not None:
            world = _advance(world, sev.NodeMoved(host), now, out)
    return world


def _move(world: World, host: str, store: str, *, guest: bool) -> scmd.MoveNode | None:
    """Where this node's stores have to be, if that is not where this one is."""
    at = address_of(store)
    if guest:  # one of this machine offers what only this machine reaches, until there are others
        here = world.here or world.door
        known = world.guests.get(host)
        moves = known is not None and known.here and is_loopback(at) and not is_loopback(here) and networks.wide(world)
        return scmd.MoveNode(host, here) if moves and here else None
    home = world.hosts.get(host)
    if home is None or home.address in ("", at):
        return None
    interface = next((i.name for i in home.addresses if i.address == home.address), "")
    return scmd.MoveNode(host, home.address, interface)
