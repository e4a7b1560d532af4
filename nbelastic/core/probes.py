"""Rounds of probes that are under way: of a host before it is used, and between the hosts of a world."""

from __future__ import annotations

from msgspec import Struct

from nbelastic.protocol.cluster_limits import NEVER


class Admission(Struct, frozen=True):
    """A host whose network is probed. Its agent is ready; no worker is started there yet. A probe is (prober, target)."""

    number: int  # of its present round of probes
    partners: tuple[str, ...]  # hosts that the present round probes
    addresses: tuple[str, ...]  # of the host, at which all earlier partners reached it
    until: float  # when the round ends without the missing answers
    awaited: frozenset[tuple[str, str]]  # probes without an answer yet
    answers: dict[tuple[str, str], tuple[str, ...]] = {}  # for each probe, the addresses that answered
    passed: frozenset[str] = frozenset()  # partners of earlier rounds


class PartitionCheck(Struct, frozen=True):
    """A round of probes between the hosts of a world. A pair of hosts is in the order of their names."""

    number: int = 0  # of this round of probes
    until: float = NEVER  # when the round ends without the missing answers
    awaited: frozenset[tuple[str, str]] = frozenset()  # probes (prober, target) without an answer yet
    pairs: frozenset[tuple[str, str]] = frozenset()  # that this round probes, each in both directions
    fully_probed: tuple[str, ...] = ()  # hosts of which each pair is probed
    unreached: frozenset[tuple[str, str]] = frozenset()  # pairs of which one host did not reach the other
    failed_rounds: dict[tuple[str, str], int] = {}  # in how many rounds in a row a pair was unreached
