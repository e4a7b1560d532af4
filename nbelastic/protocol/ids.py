"""What names a worker, a host and an interface."""

from __future__ import annotations

from msgspec import Struct


class WorkerId(Struct, frozen=True, order=True, cache_hash=True, gc=False):
    """`host/slot#incarnation`: a restarted process is a new worker, so that late news of the old one cannot hit it."""

    host: str
    slot: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.host}/{self.slot}#{self.incarnation}"

    @staticmethod
    def parse(text: str) -> WorkerId:
        """The inverse of `str`. ValueError if it is none."""
        host, _, rest = text.rpartition("/")
        slot, _, incarnation = rest.partition("#")
        return WorkerId(host, int(slot), int(incarnation))


class HostSpec(Struct, frozen=True):
    """A host as it was asked for: `slots` is how many workers it may run."""

    name: str
    slots: int
    user: str = ""


class Interface(Struct, frozen=True):
    """A network interface of a host and one of its addresses: eth0, 10.0.0.2. IPv6 has no brackets and no scope."""

    name: str
    address: str
