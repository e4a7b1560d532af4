"""Hosts behind ssh whose agents did not answer when they were to end. These agents end by themselves, after their lease."""

from __future__ import annotations

import math

from nbelastic.core import commands as cmd
from nbelastic.protocol.timeouts import LAST_CHECKPOINT
from nbelastic.transport.sockets import RETRANSMIT

MINUTE = 60.0  # seconds


class UnansweredHosts:
    """Lives in the driver's thread. `lease`, `heartbeat`: of the agents, in seconds."""

    def __init__(self, lease: float, heartbeat: float) -> None:
        self._lease, self._silent = lease, RETRANSMIT * heartbeat
        self._hosts: dict[str, float] = {}  # when each was given up

    def note_end(self, host: str, silence: float, now: float) -> None:
        """The driver gives up this host's agent, or has seen it end. `silence`: seconds since its last message."""
        self._hosts.pop(host, None)  # the agent has also ended earlier ones of its host
        if silence > self._silent:
            self._hosts = {**self._alive(now), host: now}

    def _alive(self, now: float) -> dict[str, float]:
        """The hosts whose agents may still run: the others have ended after their lease."""
        return {host: at for host, at in self._hosts.items() if now - at <= self._lease + LAST_CHECKPOINT}

    def record(self, now: float) -> cmd.Record | None:
        """What to say of them at the stop; None: all have answered."""
        hosts = self._alive(now)
        if not hosts:
            return None
        minutes = math.ceil(self._lease / MINUTE)
        lease = f"{minutes} minutes" if minutes > 2 else f"{math.ceil(self._lease)} s"
        names = ", ".join(sorted(hosts))
        text = f"{names} did not answer the stop: an agent that still runs there ends by itself within {lease}"
        return cmd.Record("hosts-unanswered", text)
