"""Hosts that are pods, and whose pods Kubernetes ends: their workers leave before, and then the host gets another pod."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from nbelastic.protocol import events as ev
from nbelastic.provision.launchers import Agent
from nbelastic.provision.pod_tunnel import PodTunnel
from nbelastic.provision.pods import PodAgent


def returns(agent: Agent | None, known: bool) -> bool:
    """Whether Kubernetes ends the agent's pod or has ended it, so that the host gets another. `known`: an earlier driver knew that."""
    return known or (isinstance(agent, PodAgent | PodTunnel) and agent.returns)


def announced_ends(agents: Mapping[str, Agent | None]) -> Iterator[ev.HostRemoved]:
    """New announcements of ends. Agents report a SIGTERM themselves, but not how much time is left."""
    for host, agent in agents.items():
        notice = agent.take_notice() if isinstance(agent, PodAgent | PodTunnel) else None
        if notice is not None:
            within = None if notice.at is None else max(0.0, notice.at - time.monotonic())
            yield ev.HostRemoved(host, by=notice.why, within=within)
