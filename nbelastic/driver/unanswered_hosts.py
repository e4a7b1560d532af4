"""Hosts behind ssh whose agents did not answer when they were to end. These agents end by themselves, after their lease."""

from __future__ import annotations

import math

from nbelastic.core import commands as cmd
from nbelastic.transport.sockets import RETRANSMIT

MINUTE = 60.0  # seconds


class UnansweredHosts:
    """Lives in the driver's thread. `lease`, `heartbeat`: of the agents, in seconds."""

    def __init__(self, lease: float, heartbeat: float) -> None:
        self._lease, self._silent = lease, RETRANSMIT * heartbeat
        self._hosts: set[str] = set()

    def note_end(self, host: str, silence: float) -> None:
        """The driver gives up this host's agent, or has seen it end. `silence`: seconds since its last message."""
        if silence > self._silent:
            self._hosts.add(host)
        else:  # it has also ended earlier agents of its host
            self._hosts.discard(host)

    def record(self) -> cmd.Record | None:
        """What to say of them at the stop; None: all have answered."""
        if not self._hosts:
            return None
        minutes = math.ceil(self._lease / MINUTE)
        lease = f"{minutes} minutes" if minutes > 2 else f"{math.ceil(self._lease)} s"
        names = ", ".join(sorted(self._hosts))
        text = f"{names} did not answer the stop: an agent that still runs there ends by itself within {lease}"
        return cmd.Record("hosts-unanswered", text)
