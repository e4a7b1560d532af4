"""Schedules of faults and of users' orders: drawn from a seed, written as one line of JSON, shrunk by leaving out what is not needed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from nbelastic.protocol import events as ev
from nbelastic.protocol.host_parsing import parse_host
from tests.simulation.network import DRIVER
from tests.simulation.world import CALM, World

HOSTS = ("a", "b", "c", "d")
SLOTS = 2
KINDS = (  # and how often each is drawn
    *(("kill", 6), ("stop", 2), ("kill_agent", 2), ("power_off", 2)),
    *(("cut_driver", 2), ("cut_to_driver", 1), ("cut_from_driver", 1), ("cut_hosts", 2), ("slow", 2)),
    ("kill_driver", 2),
    *(("remove", 2), ("add", 2), ("scale", 2), ("announce", 2), ("restart", 1), ("pause", 1)),
)
WEIGHTS = dict(KINDS)


class Fault(NamedTuple):
    """`kind` at the time `at`. `one` and `other` choose a host or worker; `seconds`: how long it lasts."""

    at: float
    kind: str
    one: int = 0
    other: int = 0
    seconds: float = 0.0


Schedule = tuple[Fault, ...]


def draw(seed: int, length: float = 600.0, interval: float = 20.0) -> Schedule:
    """Faults in so many seconds, one each `interval` on average, some of them close together."""
    rng, now, faults = random.Random(seed), 0.0, []
    while True:
        now += rng.expovariate(1.0 / interval) if rng.random() < 0.7 else rng.uniform(0.0, 2.0)
        if now >= length:
            return tuple(faults)
        (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        seconds = rng.choice((0.05, 0.5, 2.0, 8.0, 20.0, 60.0)) * rng.uniform(0.5, 1.5)
        faults.append(Fault(round(now, 3), kind, rng.randrange(1000), rng.randrange(1000), round(seconds, 3)))


def as_line(seed: int, schedule: Schedule) -> str:
    return json.dumps([seed, [list(fault) for fault in schedule]])


def parsed(line: str) -> tuple[int, Schedule]:
    seed, faults = json.loads(line)
    return seed, tuple(Fault(*fault) for fault in faults)


def play(seed: int, schedule: Schedule, length: float = 600.0) -> World:
    """Run a cluster of eight workers through the schedule, mend everything, and check that it trains."""
    world = World(seed, [f"{host}:{SLOTS}" for host in HOSTS], min=2, cooldown=(0.5, 5.0), elastic_timeout=None)
    for fault in schedule:
        world.clock.at(fault.at, _cause, world, fault)
    world.clock.run_until(length)
    _mend(world, grows=seed % 2 == 1)
    world.check_trains()
    with world.no_loss():
        _give_orders(world, HOSTS[seed % len(HOSTS)])
    return world


def shrink(seed: int, schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """A shortest part of the schedule that still fails: no single fault can be left out of it."""
    size = max(1, len(schedule) // 2)
    while True:
        for at in range(0, len(schedule), size):
            shorter = schedule[:at] + schedule[at + size :]
            if fails(shorter):
                schedule = shorter
                break
        else:
            if size == 1:
                return schedule
            size = max(1, size // 2)


def _cause(world: World, fault: Fault) -> None:
    cluster, network, clock = world.cluster, world.network, world.clock
    host, other = HOSTS[fault.one % len(HOSTS)], HOSTS[fault.other % len(HOSTS)]
    workers = sorted(world.workers(), key=lambda worker: worker.id)
    worker = workers[fault.one % len(workers)] if workers else None
    agent = next(iter(world.running.get(host, [])), None)
    match fault.kind:
        case "kill" if worker is not None:
            _agent_of(world, worker).kill(worker.id, -9)
        case "stop" if worker is not None and not worker.is_stopped:
            _agent_of(world, worker).stop_worker(worker.id)
            clock.after(fault.seconds, worker.go_on)
        case "kill_agent" if agent is not None:
            agent.die()
        case "power_off":
            world.down.add(host)
            if agent is not None:
                agent.die()
            clock.after(fault.seconds, world.down.discard, host)
        case "kill_driver":
            world.drivers.kill(fault.seconds, fault.one % 4 if fault.other % 2 else None)
        case "cut_driver" | "cut_to_driver" | "cut_from_driver":
            for path in _paths(fault.kind, host):
                network.sever(*path)
                clock.after(fault.seconds, _mend_path, world, path)
        case "cut_hosts" if host != other:
            for path in ((host, other), (other, host)):
                network.sever(*path)
                clock.after(fault.seconds, _mend_path, world, path)
        case "slow":
            for path in ((host, DRIVER), (DRIVER, host)):
                network.slow[path] = (0.1, 1.0, 3.0)[fault.other % 3]
                clock.after(fault.seconds, network.slow.pop, path, None)
        case "remove" if host in cluster.hosts:
            world.post(ev.HostRemoved(host, fault.other % 3 == 0, "a user"))
            clock.after(fault.seconds, _add, world, host)
        case "add":
            _add(world, host)
        case "scale":
            low = 1 + fault.one % 4
            world.post(ev.Scaled(low, low + fault.other % 6, "a user"))
        case "announce" if agent is not None:
            agent.announce_end(1.0 + fault.seconds)
            clock.after(fault.seconds + 5.0, _add, world, host)
        case "restart" if cluster.workers:
            known = sorted(cluster.workers)
            world.post(ev.RestartRequested(known[fault.one % len(known)], "a user"))
        case "pause":
            world.post(ev.PauseRequested("a user"))
            clock.after(fault.seconds, lambda: world.post(ev.ResumeRequested("a user")))


def _agent_of(world: World, worker):
    return next(
        agent for agents in world.running.values() for agent in agents if agent.workers.get(worker.id) is worker
    )


def _paths(kind: str, host: str) -> Iterator[tuple[str, str]]:
    if kind != "cut_from_driver":
        yield host, DRIVER
    if kind != "cut_to_driver":
        yield DRIVER, host


def _mend_path(world: World, path: tuple[str, str]) -> None:
    world.network.mend(*path)
    world.groups.go_on()


def _add(world: World, host: str) -> None:
    if not world.cluster.stopping:
        world.post(ev.HostAdded(parse_host(f"{host}:{SLOTS}", 1), "a user"))


def _give_orders(world: World, host: str) -> None:
    """Without any fault, but with a slow network, a host leaves and comes back."""
    for each in HOSTS:
        world.network.slow |= {(each, DRIVER): 0.5, (DRIVER, each): 0.5}
    world.post(ev.HostRemoved(host, by="a user"))
    world.clock.run_until(world.clock.now + CALM)
    assert host not in world.cluster.hosts, f"{host} has not left: {world.reason}"
    _add(world, host)
    world.clock.run_until(world.clock.now + CALM)


def _mend(world: World, *, grows: bool) -> None:
    """End all faults: there is a driver, every machine runs and is reached, and every host is wanted. `grows`: so are all workers."""
    world.down.clear()
    world.drivers.begin_soon()
    for path in list(world.network.cut):
        _mend_path(world, path)
    world.network.slow.clear()
    for worker in world.workers():
        if worker.is_stopped:
            worker.go_on()
    world.post(ev.ResumeRequested("a user"))
    if grows:  # it lets members go on that should have gone on before
        world.post(ev.Scaled(2, None, "a user"))
    for host in HOSTS:
        if grows or host not in world.cluster.hosts:
            _add(world, host)
