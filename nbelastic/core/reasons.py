"""Why the next thing has not happened yet: data, of which `in_words` makes a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

SENTENCES = MappingProxyType(
    {
        "no-hosts": "no hosts yet",
        "stopping": "stopping: {text}",
        "last-checkpoints": "programs may write a last checkpoint: {names}",
        "idle": "{done} workers ready; no job is running",
        "job-failed": "{names} failed: {text}",
        "too-few": "{done} of min {of} workers ready",
        "ready": "{done} workers ready",
        "kept": "the training state is kept on {names}, for a worker there",
        "not-formed": "generation {generation} did not form: its hosts probe one another",
        "new-store": "{names} has to offer a store {text}",
        "entered": "{of} workers join generation {generation}",
        "joining": "{done} of {of} have joined generation {generation}",
        "training": "{of} workers train in generation {generation}",
        "left-out": "{names} is {text}",
        "disconnected": "the next change waits for the connection to {names}",
        "put-off": "the next change waits, as {text}",
        "last-holder": "the last worker with the training state has to leave",
        "changing": "from {done} to {of} workers: preparing generation {generation}",
        "preparing": "not prepared yet: {names}",
        "asking": "{of} workers agree on the commit to leave at",
        "asked": "{done} of {of} have reported where they are",
        "agreed": "all leave generation {generation} at its commit {commit}",
        "halting": "{of} workers stop at the next commit",
        "stepping": "{of} workers train on to commit {commit} of generation {generation}",
        "in-cell": "a cell runs on {done} of {of} workers, at commit {commit} of generation {generation}",
        "swapping": "{of} workers run the new program to its first commit",
        "paused": "paused by {text} at commit {commit} of generation {generation}",
        "leaving": "{done} of {of} have left generation {generation} at the agreed commit",
        "broken": "{done} of {of} survivors have left generation {generation}; not yet {names}",
        "irreplaceable": "{text}",
        "finishing": "{done} of {of} ranks have finished",
        "stall": "{text}",
        "round": "{text} in round {generation}",
        "round-over": "round {generation} is over; not yet ended on {names}",
        "nodes-finished": "{done} of {of} nodes have finished",
        "rank-failed": "{text}; waiting for the other nodes",
        "full": "the cluster is full: {done} of max {of} workers",
        "script-ended": "{text}",
    }
)
MISSING = MappingProxyType(
    {
        "starting": "{name} ({age})",
        "starting again": "{name} ({age}; {why})",
        "in a setup cell": "{name} (in a setup cell for {age})",
        "host starting": "{name} to start",
        "host queued": "{name} ({why}, {age})",
        "node": "{name}",
        "host": "{name}: {why}",
        "lost": "{name} (lost: {why}; tried again in {left})",
        "backoff": "{name} (in back-off, {left} more: {why})",
        "programs": "the last job's programs to stop",
        "failed": "{name} (failed: {why})",
    }
)
MOST = 3  # names, and missing things, in one sentence


class Missing(Struct, frozen=True):
    """A worker, host or slot that the cluster waits for. `state` is a key of `MISSING`; times are monotonic seconds."""

    state: str
    name: str = ""
    why: str = ""
    since: float = 0.0
    until: float = 0.0


class Reason(Struct, frozen=True, omit_defaults=True):
    """`kind` is a key of `SENTENCES`, which names the other fields. `missing` is None if nothing can be missing."""

    kind: str
    done: int = 0
    of: int = 0
    generation: int = 0  # of a script: its round
    commit: int = 0
    names: tuple[str, ...] = ()
    text: str = ""
    missing: tuple[Missing, ...] | None = None
    then: Reason | None = None  # one more


def and_also(reason: Reason, then: Reason) -> Reason:
    """The reason with another one at its end."""
    last = then if reason.then is None else and_also(reason.then, then)
    return replace(reason, then=last)


def with_queued(reason: Reason, states: Mapping[str, str]) -> Reason:
    """The reason in which hosts that have not started are queued. `states`: those of their jobs, by host."""
    missing, then = reason.missing, reason.then
    return replace(
        reason,
        missing=None if missing is None else tuple(_with_state(each, states) for each in missing),
        then=None if then is None else with_queued(then, states),
    )


def _with_state(missing: Missing, states: Mapping[str, str]) -> Missing:
    state = states.get(missing.name, "") if missing.state == "host starting" else ""
    return Missing("host queued", missing.name, state, missing.since) if state else missing


def queued_hosts(reason: Reason) -> tuple[str, ...]:
    """The hosts in the reason that are queued."""
    own = tuple(each.name for each in reason.missing or () if each.state == "host queued")
    return own if reason.then is None else own + queued_hosts(reason.then)


def in_words(reason: Reason, now: float) -> str:
    """The sentence, at `now` (seconds, monotonic)."""
    sentence = SENTENCES[reason.kind].format(
        done=reason.done,
        of=reason.of,
        generation=reason.generation,
        commit=reason.commit,
        names=listed(reason.names),
        text=reason.text,
    )
    clauses = [sentence]
    if reason.missing is not None:
        clauses.append(missing_in_words(reason.missing, now))
    if reason.then is not None:
        clauses.append(in_words(reason.then, now))
    return "; ".join(clauses)


def listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:MOST]) + ", …" * (len(names) > MOST)


def missing_in_words(missing: tuple[Missing, ...], now: float) -> str:
    """What the cluster waits for, or what would help."""
    parts = [
        MISSING[each.state].format(
            name=each.name, why=each.why, age=_seconds(now - each.since), left=_seconds(each.until - now)
        )
        for each in missing
    ]
    return "waiting for " + ", ".join(parts) if parts else "add a host or lower min"


def _seconds(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s"
