"""Hosts that are batch jobs or pods, and whose agents have not connected yet: what their queue says of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from nbelastic.provision.launchers import Agent, BatchJobAgent
from nbelastic.provision.pod_tunnel import PodTunnel
from nbelastic.provision.pods import PodAgent

MOST_QUERIES = 8  # at a time; each lasts up to 20 s


async def states_of(agents: Mapping[str, Agent | None]) -> dict[str, str]:
    """By host, the state of its batch job or pod. The query of a failed job makes its agent object report the failure."""
    queued = {host: agent for host, agent in agents.items() if isinstance(agent, BatchJobAgent | PodAgent | PodTunnel)}
    free = asyncio.Semaphore(MOST_QUERIES)

    async def state_of(agent: BatchJobAgent | PodAgent | PodTunnel) -> str:
        async with free:
            return await agent.state()

    return dict(zip(queued, await asyncio.gather(*map(state_of, queued.values())), strict=True))
