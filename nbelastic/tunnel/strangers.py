"""What a connection may do before the server behind its port has accepted its key: the peer is a stranger until then.

The servers are ZeroMQ's with CURVE (RFC 26). A client sends about 1,000 bytes, and waits for READY. Only then it sends messages.
"""

from __future__ import annotations

SERVER_PART = 64 + 170  # bytes that a server sends to a stranger: its greeting and WELCOME; READY follows
STRANGER_PART = 1 << 12  # bytes that a stranger may send
CHANNELS = 8  # of one tunnel to one port, at most; an agent opens one, and opens it again if it breaks
CHANNELS_PER_ENGINE = 2  # more, for each engine of the host


def most_channels(engines: int) -> int:
    """How many channels of one tunnel may lead to one port. `engines`: how many workers of a host connect to ipyparallel."""
    return CHANNELS + CHANNELS_PER_ENGINE * engines
