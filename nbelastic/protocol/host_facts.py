"""What `nbelastic doctor` learns about a host: the answers of `agent/host_facts.py`, as lines of JSON."""

from __future__ import annotations

from msgspec import Struct

from nbelastic.protocol.ids import Gpu

MARK = "nbelastic-doctor "  # begins each answer: a shell may print other lines


class HostFacts(Struct, frozen=True):
    """The first answer. `token`: who sends its first half to one of the `ports` receives its second half.

    So no stranger gets an answer, and equal addresses of two hosts are not confused.
    """

    versions: dict[str, str]
    python: str  # path of the interpreter
    addresses: dict[str, tuple[str, ...]]  # by interface, without loopback addresses
    ports: dict[str, int]  # by address: where this host listens
    token: str
    gpus: tuple[Gpu, ...] = ()
    open_files: int = 0  # the limit, once raised


class Target(Struct, frozen=True):
    """What the host is asked to connect to."""

    host: str
    address: str
    port: int
    token: str


class Reached(Struct, frozen=True):
    """The second answer, for each target: `error` is empty if it answered."""

    host: str
    address: str
    error: str = ""
