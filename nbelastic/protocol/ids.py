"""Identifiers: of a worker, of a host, of a network interface."""

from __future__ import annotations

from msgspec import Struct


class WorkerId(Struct, frozen=True, order=True, cache_hash=True, gc=False):
    """A worker, as `host/slot#incarnation`. Each restart has a new incarnation, so that stale messages cannot affect it."""

    host: str
    slot: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.host}/{self.slot}#{self.incarnation}"

    @staticmethod
    def parse(text: str) -> WorkerId:
        """The inverse of `str`. ValueError if the text is not a worker's."""
        host, _, rest = text.rpartition("/")
        slot, _, incarnation = rest.partition("#")
        return WorkerId(host, int(slot), int(incarnation))


class HostSpec(Struct, frozen=True):
    """A host as a client or a discovery has named it. `slots`: how many workers it may run; `user`: for ssh.

    `follows_gpus`: no number was given, so it has as many slots as GPUs, once its agent has found any.
    """

    name: str
    slots: int
    user: str = ""
    follows_gpus: bool = False


class Gpu(Struct, frozen=True):
    """A GPU, or a slice of one (MIG), that workers may use. `id`: its UUID, as CUDA_VISIBLE_DEVICES takes it.

    `problem`: why no worker may start on it; empty: it is healthy.
    """

    id: str
    problem: str = ""


class Interface(Struct, frozen=True):
    """A network interface and one of its addresses: `eth0`, `10.0.0.2`. IPv6 has no brackets and no scope."""

    name: str
    address: str
