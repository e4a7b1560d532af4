"""Converts the event log to Chrome's Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

The cluster and each host is a process of the trace, and each slot a row. The cluster's row "changes" shows each change of
the world with its phases below it. The world's size is a counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from nbelastic.protocol.status import EventRecord

PHASES = ("detect", "abort", "leave", "form", "sync", "", "first step")  # in order; an unknown phase is sorted as ""
PREPARE = "prepare"  # lies before the change, while the training goes on, and is not part of its `all`
CLUSTER, EVENTS, CHANGES = 1, 1, 2  # the cluster's process, and its rows

Entry = dict[str, Any]
Row = tuple[str, str]  # host and slot; "" is the host itself, or the cluster


def trace(events: Sequence[EventRecord], name: str) -> dict[str, Any]:
    """Return the trace for `json.dump`. Times are in microseconds since `otherData.begun` (seconds since 1970)."""
    rows = _rows(events)
    entries = [*_instants(events, rows), *_sizes(events), *_changes(events)]
    entries.sort(
        key=lambda entry: (entry["ts"], -entry.get("dur", 0))
    )  # an entry that encloses others comes before them
    begun = entries[0]["ts"] if entries else 0
    for entry in entries:
        entry["ts"] -= begun
    return {
        "traceEvents": [*_names(rows, name), *entries],
        "displayTimeUnit": "ms",
        "otherData": {"cluster": name, "begun": begun / 1_000_000},
    }


def _row(event: EventRecord) -> Row:
    """Return the row of an event. A worker, `host/slot#incarnation`, shares its slot's row with its successors."""
    host, _, rest = event.worker.rpartition("/")
    return event.host or host, rest.partition("#")[0]


def _rows(events: Sequence[EventRecord]) -> dict[Row, tuple[int, int]]:
    """Return the process and thread of each row. Hosts are in the order of their first event, slots by number."""
    rows: dict[Row, tuple[int, int]] = {("", ""): (CLUSTER, EVENTS)}
    found = dict.fromkeys(map(_row, events))
    hosts = list(dict.fromkeys(host for host, _ in found if host))
    for pid, host in enumerate(hosts, CLUSTER + 1):
        slots = sorted({slot for where, slot in found if where == host} | {""}, key=lambda slot: (len(slot), slot))
        rows |= {(host, slot): (pid, tid) for tid, slot in enumerate(slots, 1)}
    nowhere = [row for row in found if row not in rows]  # of workers without a host
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


def _instants(events: Iterable[EventRecord], rows: dict[Row, tuple[int, int]]) -> Iterator[Entry]:
    for event in events:
        pid, tid = rows[_row(event)]
        details = {"text": event.text, "worker": event.worker, "generation": event.generation}
        args = {key: value for key, value in details.items() if value}
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
    """Yield each change. Changes do not overlap: the part before the end of the previous change is cut off."""
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
    """Return, for each generation, the event that lists the most phases of its change."""
    best: dict[int, EventRecord] = {}
    for event in events:
        if event.took and (event.generation not in best or len(event.took) >= len(best[event.generation].took)):
            best[event.generation] = event
    return sorted(best.values(), key=lambda event: event.time)


def _spans(event: EventRecord, free: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, begin, length) of the whole change, of its phases up to the event's time, and of its preparation.

    Each phase is that of the slowest member: if their sum exceeds the whole, the first phases are cut.
    """
    phases = {name: took for name, took in event.took.items() if name not in ("all", PREPARE)}
    end = max(free, _micro(event.time * 1000))
    begin = max(free, end - _micro(event.took.get("all", sum(phases.values()))))
    yield f"generation {event.generation}", begin, end - begin
    if PREPARE in event.took:
        earlier = max(free, begin - _micro(event.took[PREPARE]))
        yield PREPARE, earlier, begin - earlier
    after = end
    for name in sorted(phases, key=_place)[::-1]:
        at = max(begin, after - _micro(phases[name]))
        yield name, at, after - at
        after = at


def in_order(took: Mapping[str, float]) -> dict[str, float]:
    """Return the phases of a change in order: the preparation first, the whole last."""
    return dict(sorted(took.items(), key=lambda phase: (phase[0] != PREPARE, phase[0] == "all", _place(phase[0]))))


def _place(phase: str) -> int:
    return PHASES.index(phase if phase in PHASES else "")


def _micro(milliseconds: float) -> int:
    return round(milliseconds * 1000)
