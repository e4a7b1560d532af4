"""What the driver keeps about one start of a host's agent."""

from __future__ import annotations

import asyncio

from nbelastic.driver.driver_snapshot import SavedAgent
from nbelastic.driver.pod_hosts import returns
from nbelastic.protocol import messages
from nbelastic.provision.launchers import Agent


class AgentHandle:
    """One start of an agent: its name as a peer and, once its host has been located, its process."""

    def __init__(self, host: str, number: int) -> None:
        self.host, self.number = host, number
        self.peer = f"agent/{host}~{number}"
        self.agent: Agent | None = None
        self.driver_address = ""  # the driver's address as this host reaches it; empty: same machine
        self.slots = 0
        self.local_slots = 0  # the same if the host is this machine, else 0
        self.rehome: messages.Rehome | None = None  # the newest address of its workers, if that has changed
        self.is_adopted = False  # an earlier driver has started it
        self.launch: asyncio.Task[None] | None = None
        self.returned = False  # an earlier driver knew that Kubernetes ends its pod
        self.drain_announced = False  # that Slurm drains the node of its job: once, as a user may add the host again
        self.disconnected_at = 0.0  # when its connection ended last
        self.is_ending = False  # it was asked to end, or killed
        self.was_killed = False

    def saved(self, heard_at: float) -> SavedAgent | None:
        """The agent for the driver snapshot; None: it has not started. `heard_at`: when its last message came; 0: none has."""
        if self.agent is None:
            return None
        return SavedAgent(
            self.number,
            self.agent.process,
            self.driver_address,
            self.rehome,
            self.agent.job,
            returns(self.agent, self.returned),
            bool(self.disconnected_at) and self.disconnected_at > heard_at,
            self.drain_announced,
        )

    def kill(self) -> None:
        self.is_ending = self.was_killed = True
        if self.launch is not None:
            self.launch.cancel()
        if self.agent is not None:
            self.agent.kill()
