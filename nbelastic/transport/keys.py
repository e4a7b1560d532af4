"""The CURVE key pairs of a cluster."""

from __future__ import annotations

import msgspec
import zmq


class Keys(msgspec.Struct, frozen=True):
    """A cluster's CURVE key pairs (Z85 text). They never appear in argv, logs or `repr`."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    def __repr__(self) -> str:
        return "Keys(…)"

    @staticmethod
    def make() -> Keys:
        pairs = [key.decode() for _ in range(2) for key in zmq.curve_keypair()]
        return Keys(*pairs)

    def for_clients(self) -> Keys:
        """The keys for agents and terminals: all but the driver's secret."""
        return msgspec.structs.replace(self, server_secret="")


class OneClientKey:
    """The one client key that the handshake accepts (pyzmq's credentials provider)."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002  (pyzmq's signature)
        return bytes(key) == self._key
