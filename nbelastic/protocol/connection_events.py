"""Events about hosts whose agents run without a connection, or cannot start workers yet."""

# mypy: disable-error-code="misc"
# (subclasses of a frozen msgspec struct are frozen, too, which mypy does not know)
from __future__ import annotations

from nbelastic.protocol.events import Event


class HostDisconnected(Event):
    """Driver → core: the connection to this host's agent has ended, and is opened again. The agent may run on.

    `number`: see `AgentLost`. `redials`: the host opens it, and not the driver's machine.
    """

    host: str
    reason: str
    number: int = 0
    redials: bool = False


class HostReconnected(Event):
    """Driver → core: after `HostDisconnected`, a message of this host's agent has arrived."""

    host: str


class EnvironmentReported(Event):
    """Agent → core: the host makes an environment for the user's requirements. `text`: how far it is, in words."""

    host: str
    text: str
