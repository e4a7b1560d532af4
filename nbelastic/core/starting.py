"""Agents that never speak, and workers that never come up."""

from __future__ import annotations

from nbelastic.core import commands as cmd
from nbelastic.core import generations, provisioning
from nbelastic.core.state import World

Commands = list[cmd.Command]


def overdue(world: World, now: float, out: Commands) -> World:
    """They have had their time: their hosts count as lost, and other workers are started in their place."""
    timeouts = world.limits.timeouts
    for name, host in tuple(world.hosts.items()):
        if now >= provisioning.speaks_by(world, host):
            why = f"its agent has said nothing for {timeouts.agent:g} s"
            world = generations.leave_out(world, name, why, now, out, kind="host-lost")
    for w in [w for w in sorted(world.starting) if now >= provisioning.comes_by(world, w)]:
        why = f"{w} has not come up within {now - world.workers[w].since:.0f} s"
        out.append(cmd.StopWorker(w, kill=True))
        world = generations.gone(world, w, why, now, out)
    return world
