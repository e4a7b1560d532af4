"""How a host shows the TCP proxy that it belongs to the cluster, before a byte of its tunnel is handled.

The host sends the preamble. The proxy answers with a random challenge, and the host with the challenge's HMAC. Both derive the
key from the cluster's client key. What a channel carries is protected by CURVE keys as well.
"""

from __future__ import annotations

import hmac

SIZE = 32  # bytes of the challenge, and of the answer


def key_from(client_secret: str) -> bytes:
    """The key of the cluster's tunnels, from the client's CURVE secret."""
    return hmac.digest(client_secret.encode(), b"nbelastic tunnel", "sha256")


def answer_to(challenge: bytes, key: bytes) -> bytes:
    """What a holder of the key answers."""
    return hmac.digest(key, challenge, "sha256")
