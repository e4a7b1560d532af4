"""Parse hosts as users and discovery scripts write them: `alice@gpu1:4`."""

from __future__ import annotations

import re

from nbelastic.errors import UsageError
from nbelastic.protocol.ids import HostSpec

_HOST = re.compile(  # ssh would take a name that begins with "-" for an option
    r"(?:(?P<user>\w[\w.-]*)@)?"
    r"(?P<name>\[(?=[^]]*:)[0-9a-fA-F:.]+(?:%[\w.-]+)?\]|\w[\w.-]*)"
    r"(?::(?P<slots>[^:]*))?"
)
_SLOTS = re.compile(r"0*[1-9][0-9]{0,3}")  # a larger number may be a port: so many processes would be started


def parse_host(text: str, default_slots: int, *, follow_gpus: bool = False) -> HostSpec:
    """Parse `name`, `name:slots` or `user@name:slots`; IPv6 addresses in brackets. UsageError for any other text.

    A host without a number has `default_slots` or, with `follow_gpus`, as many as GPUs if it has any.
    """
    text = text.strip()
    match = _HOST.fullmatch(text)
    if not match:
        raise UsageError(f"{text!r} is not a valid host: write name, name:slots or user@name:slots (IPv6 in brackets).")
    try:
        match["name"].encode("idna")  # as name resolution does
    except UnicodeError:
        raise UsageError(
            f"{text!r}: {match['name']!r} is not a valid host name: each part between dots has 1 to 63 characters."
        ) from None
    slots = match["slots"]
    if slots is not None and not _SLOTS.fullmatch(slots):
        raise UsageError(f"{text!r}: the number of slots must be a whole number from 1 to 9999, not {slots!r}.")
    number, follows = (int(slots), False) if slots else (default_slots, follow_gpus)
    return HostSpec(match["name"].strip("[]"), number, match["user"] or "", follows)


def parse_hosts(text: str, default_slots: int, *, follow_gpus: bool = False) -> tuple[HostSpec, ...]:
    """Parse a comma-separated list, as in `--hosts gpu1:4,gpu2:4`. UsageError if a name appears twice."""
    hosts = tuple(parse_host(part, default_slots, follow_gpus=follow_gpus) for part in text.split(",") if part.strip())
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"host {twice[0]!r} is listed more than once: give it once, with all its slots.")
    return hosts


def parse_script_output(text: str, default_slots: int) -> tuple[HostSpec, ...]:
    """Parse a discovery script's output: one host per line; blank and repeated lines are ignored.

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
