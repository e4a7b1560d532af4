"""Hosts as people and scripts write them: `alice@gpu1:4`."""

from __future__ import annotations

import re

from nbelastic.errors import UsageError
from nbelastic.protocol.ids import HostSpec

_HOST = re.compile(  # a name that began with - would be an option to ssh
    r"(?:(?P<user>\w[\w.-]*)@)?"
    r"(?P<name>\[(?=[^]]*:)[0-9a-fA-F:.]+(?:%[\w.-]+)?\]|\w[\w.-]*)"
    r"(?::(?P<slots>[^:]*))?"
)


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
