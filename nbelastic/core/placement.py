"""Hosts and slots -> ranks. Pure functions; ranks are stable for survivors and packed by host."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from nbelastic.core.errors import UsageError
from nbelastic.core.messages import HostSpec, WorkerId

_HOST = re.compile(  # a name that began with - would be an option to ssh
    r"(?:(?P<user>\w[\w.-]*)@)?"
    r"(?P<name>\[(?=[^]]*:)[0-9a-fA-F:.]+(?:%[\w.-]+)?\]|\w[\w.-]*)"
    r"(?::(?P<slots>[^:]*))?"
)


class Place(Struct, frozen=True, gc=False):
    """Where one rank stands: the six numbers of Horovod's and torchrun's contracts."""

    rank: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def parse_host(text: str, default_slots: int) -> HostSpec:
    """`name`, `name:slots` or `user@name:slots`; IPv6 addresses in brackets. UsageError says what is wrong with it."""
    text = text.strip()
    match = _HOST.fullmatch(text)
    if not match:
        raise UsageError(f"{text!r} is no host: write name, name:slots or user@name:slots (IPv6 in brackets).")
    try:
        match["name"].encode("idna")  # what name resolution does with it
    except UnicodeError:
        raise UsageError(
            f"{text!r}: {match['name']!r} is not a valid host name: each part between dots has 1 to 63 characters."
        ) from None
    slots = match["slots"]
    if slots is not None and not (slots.isascii() and slots.isdigit() and int(slots) > 0):
        raise UsageError(f"{text!r}: the number of slots must be a whole number of at least 1, not {slots!r}.")
    return HostSpec(match["name"].strip("[]"), int(slots) if slots else default_slots, match["user"] or "")


def parse_hosts(text: str, default_slots: int) -> tuple[HostSpec, ...]:
    """A comma-separated list, as in `--hosts gpu1:4,gpu2:4`. A name given twice is an error."""
    hosts = tuple(parse_host(part, default_slots) for part in text.split(",") if part.strip())
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"host {twice[0]!r} is listed more than once: give it once, with all its slots.")
    return hosts


def parse_script_output(text: str, default_slots: int) -> tuple[HostSpec, ...]:
    """What a discovery script printed: a host a line, blank lines ignored, the same line twice is once.

    UsageError names the line that is wrong, or the host that appears with two numbers of slots.
    """
    found: dict[str, HostSpec] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            host = parse_host(line, default_slots)
        except UsageError as error:
            raise UsageError(f"line {number}: {error}") from None
        if found.setdefault(host.name, host) != host:
            raise UsageError(f"line {number}: host {host.name!r} appears twice with different slots.")
    return tuple(found.values())


def rank_order(old: Sequence[WorkerId], new: Iterable[WorkerId], seniority: Mapping[str, int]) -> tuple[WorkerId, ...]:
    """Members by rank: `old` ones (in their old order) before `new` ones, packed by host.

    Hosts stand in the order of their oldest survivor; hosts without one follow by `seniority` (when they came).
    """
    by_host: dict[str, list[WorkerId]] = {}
    for worker in old:
        by_host.setdefault(worker.host, []).append(worker)
    for worker in sorted(new, key=lambda w: (seniority.get(w.host, len(seniority)), w)):
        by_host.setdefault(worker.host, []).append(worker)
    return tuple(worker for workers in by_host.values() for worker in workers)


def places(members: Sequence[WorkerId]) -> tuple[Place, ...]:
    """One `Place` per rank. `members` are packed by host. O(n)."""
    per_host: dict[str, int] = {}
    local: list[int] = []
    cross: list[int] = []
    with_local_rank: dict[int, int] = {}  # how many hosts have a worker of that local rank
    for worker in members:
        local_rank = per_host.get(worker.host, 0)
        per_host[worker.host] = local_rank + 1
        local.append(local_rank)
        cross.append(with_local_rank.get(local_rank, 0))
        with_local_rank[local_rank] = cross[-1] + 1
    return tuple(
        Place(rank, local[rank], per_host[worker.host], cross[rank], with_local_rank[local[rank]])
        for rank, worker in enumerate(members)
    )


def ranges(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as ranges, each from its first number up to, and without, its second."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)
