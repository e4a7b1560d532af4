"""The event log as a picture: Chrome's Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

A process for the cluster and one for each host, a row for each slot. In the cluster's row "changes" lies each change of
the world with its phases below it; the world's size is a counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from nbelastic.protocol.status import EventRecord

PHASES = ("detect", "abort", "leave", "form", "sync", "", "first step")  # in this order; unknown ones where "" stands
BESIDE = "prepare"  # while the training went on: before the change, and not in its `all`
CLUSTER, EVENTS, CHANGES = 1, 1, 2  # the cluster's process, and its rows

Entry = dict[str, Any]
Row = tuple[str, str]  # host and slot; "" for the host itself, and for the cluster


def trace(events: Sequence[EventRecord], name: str) -> dict[str, Any]:
    """The cluster's events for `json.dump`. Times in microseconds since the beginning, `otherData.begun` (s since 1970)."""
    rows = _rows(events)
    entries = [*_points(events, rows), *_sizes(events), *_changes(events)]
    entries.sort(key=lambda entry: (entry["ts"], -entry.get("dur", 0)))  # who encloses others comes before them
    begun = entries[0]["ts"] if entries else 0
    for entry in entries:
        entry["ts"] -= begun
    return {
        "traceEvents": [*_names(rows, name), *entries],
        "displayTimeUnit": "ms",
        "otherData": {"cluster": name, "begun": begun / 1_000_000},
    }


def _row(event: EventRecord) -> Row:
    """Of a worker, `host/slot#incarnation`, the slot: who comes after it goes on in its row."""
    host, _, rest = event.worker.rpartition("/")
    return event.host or host, rest.partition("#")[0]


def _rows(events: Sequence[EventRecord]) -> dict[Row, tuple[int, int]]:
    """Each row's process and thread. Hosts come in the order in which they were first heard of, slots by number."""
    rows: dict[Row, tuple[int, int]] = {("", ""): (CLUSTER, EVENTS)}
    found = dict.fromkeys(map(_row, events))
    hosts = list(dict.fromkeys(host for host, _ in found if host))
    for pid, host in enumerate(hosts, CLUSTER + 1):
        slots = sorted({slot for where, slot in found if where == host} | {""}, key=lambda slot: (len(slot), slot))
        rows |= {(host, slot): (pid, tid) for tid, slot in enumerate(slots, 1)}
    nowhere = [row for row in found if row not in rows]  # a worker of no host
    return rows | {row: (CLUSTER, tid) for tid, row in enumerate(nowhere, CHANGES + 1)}


def _names(rows: dict[Row, tuple[int, int]], name: str) -> Iterator[Entry]:
    def named(what: str, pid: int, tid: int, text: str) -> Entry:
        return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": text}}

    yield named("thread_name", CLUSTER, CHANGES, "changes")
    for (host, slot), (pid, tid) in rows.items():
        if not slot:
            yield named("process_name", pid, 0, host or name)
            yield {**named("process_sort_index", pid, 0, ""), "args": {"sort_index": pid}}
        yield named("thread_name", pid, tid, f"slot {slot}" if slot else "events")


def _points(events: Iterable[EventRecord], rows: dict[Row, tuple[int, int]]) -> Iterator[Entry]:
    for event in events:
        pid, tid = rows[_row(event)]
        told = {"text": event.text, "worker": event.worker, "generation": event.generation}
        args = {key: value for key, value in told.items() if value}
        yield {
            "name": event.kind,
            "cat": "event",
            "ph": "i",
            "s": "t",
            "ts": _micro(event.time * 1000),
            "pid": pid,
            "tid": tid,
            "args": args,
        }


def _sizes(events: Iterable[EventRecord]) -> Iterator[Entry]:
    for size, same in groupby(events, key=lambda event: event.size):
        ts = _micro(next(same).time * 1000)
        yield {"name": "world", "ph": "C", "ts": ts, "pid": CLUSTER, "tid": EVENTS, "args": {"workers": size}}


def _changes(events: Iterable[EventRecord]) -> Iterator[Entry]:
    """One after the other: what one generation's change says of the time before the last one's end is cut off."""
    free = 0
    for event in _fullest(events):
        spans = list(_spans(event, free))
        free = max((ts + dur for _, ts, dur in spans), default=free)
        for name, ts, dur in spans:
            args = (
                {"ms": event.took[name]} if name in event.took else {"text": event.text, "generation": event.generation}
            )
            yield {
                "name": name,
                "cat": "change",
                "ph": "X",
                "ts": ts,
                "dur": dur,
                "pid": CLUSTER,
                "tid": CHANGES,
                "args": args,
            }


def _fullest(events: Iterable[EventRecord]) -> list[EventRecord]:
    """Several records of a generation tell what its change took, and all but one leave something out."""
    best: dict[int, EventRecord] = {}
    for event in events:
        if event.took and (event.generation not in best or len(event.took) >= len(best[event.generation].took)):
            best[event.generation] = event
    return sorted(best.values(), key=lambda event: event.time)


def _spans(event: EventRecord, free: int) -> Iterator[tuple[str, int, int]]:
    """Names, beginnings and lengths: the whole, its phases up to the event's time, and before it what was done beside.

    The slowest member counts for each phase, so that together they may be longer than the whole: the first ones are cut.
    """
    phases = {name: took for name, took in event.took.items() if name not in ("all", BESIDE)}
    end = max(free, _micro(event.time * 1000))
    begin = max(free, end - _micro(event.took.get("all", sum(phases.values()))))
    yield f"generation {event.generation}", begin, end - begin
    if BESIDE in event.took:
        earlier = max(free, begin - _micro(event.took[BESIDE]))
        yield BESIDE, earlier, begin - earlier
    after = end
    for name in sorted(phases, key=_place)[::-1]:
        at = max(begin, after - _micro(phases[name]))
        yield name, at, after - at
        after = at


def in_order(took: Mapping[str, float]) -> dict[str, float]:
    """Phases of a change as they follow one another: what was done beside first, then the others, the whole last."""
    return dict(sorted(took.items(), key=lambda phase: (phase[0] != BESIDE, phase[0] == "all", _place(phase[0]))))


def _place(phase: str) -> int:
    return PHASES.index(phase if phase in PHASES else "")


def _micro(milliseconds: float) -> int:
    return round(milliseconds * 1000)
