"""The event log as a trace that Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
from itertools import groupby, pairwise

import pytest

from nbelastic.client.trace import trace
from nbelastic.protocol.status import EventRecord

NOON = 1_700_000_000.0  # seconds since 1970
GROWN = {"prepare": 400.0, "leave": 20.0, "form": 30.0, "sync": 10.0}
HEALED = {"detect": 5.0, "abort": 15.0, "form": 40.0, "sync": 10.0, "first step": 35.0}
STORY = [
    EventRecord(NOON, "host-added", "gpu1 with 2 slots by you", host="gpu1"),
    EventRecord(NOON + 1, "worker-ready", "gpu1/1#1 is ready", host="gpu1", worker="gpu1/1#1"),
    EventRecord(NOON + 1, "worker-ready", "gpu1/0#1 is ready", host="gpu1", worker="gpu1/0#1"),
    EventRecord(NOON + 2, "world-formed", "2 workers", generation=1, size=2, took={"form": 30.0, "sync": 0.0}),
    EventRecord(NOON + 3, "worker-ready", "gpu2/10#1 is ready", worker="gpu2/10#1", size=2),
    EventRecord(NOON + 4, "world-formed", "3 workers", generation=2, size=3, took=GROWN),
    EventRecord(NOON + 4.02, "training", "", generation=2, size=3, took={**GROWN, "first step": 15.0, "all": 72.0}),
    EventRecord(NOON + 5, "worker-lost", "gpu1/0#1 died", host="gpu1", worker="gpu1/0#1", generation=2, size=2),
    EventRecord(NOON + 5.2, "training", "", generation=3, size=2, took={**HEALED, "all": 110.0}),
    EventRecord(NOON + 6, "worker-ready", "gpu1/0#2 is ready", host="gpu1", worker="gpu1/0#2", size=2),
    EventRecord(NOON + 7, "job-succeeded", "job-1 <&> “done”"),
]


def trace_of(events):
    """Return the trace as its readers get it."""
    return json.loads(json.dumps(trace(events, "mine"), allow_nan=False))


def entries(events, ph):
    return [entry for entry in trace_of(events)["traceEvents"] if entry["ph"] == ph]


def spans(events):
    """Return (name, begin, end) of each span in microseconds since 1970."""
    begun = round(trace_of(events)["otherData"]["begun"] * 1_000_000)
    return [(e["name"], begun + e["ts"], begun + e["ts"] + e["dur"]) for e in entries(events, "X")]


def check_format(events):
    """Check the format: keys, whole numbers, order within a row, and spans that never overlap partly."""
    required = {"name", "ph", "ts", "pid", "tid", "args"}
    more = {"i": {"s", "cat"}, "X": {"dur", "cat"}, "C": set(), "M": set()}
    every = trace_of(events)["traceEvents"]
    for entry in every:
        assert set(entry) == required | more[entry["ph"]]
        assert entry["ts"] >= 0
        assert all(isinstance(entry[key], int) for key in ("ts", "pid", "tid"))
    named = {(e["pid"], e["tid"]) for e in every if e["name"] == "thread_name"}
    times = [entry for entry in every if entry["ph"] != "M"]
    assert {(e["pid"], e["tid"]) for e in times} <= named
    by_row = sorted(times, key=lambda e: (e["pid"], e["tid"]))  # stable: the file's order within a row
    for _, row in groupby(by_row, key=lambda e: (e["pid"], e["tid"])):
        for one, other in pairwise(row):
            assert one["ts"] <= other["ts"]
    open_until = []
    for entry in (e for e in times if e["ph"] == "X"):
        while open_until and open_until[-1] <= entry["ts"]:
            open_until.pop()
        end = entry["ts"] + entry["dur"]
        assert entry["dur"] >= 0
        assert not open_until or end <= open_until[-1], "a span overlaps another partly"
        open_until.append(end)


def test_the_story_is_a_valid_trace():
    """The trace of a whole cluster's life is valid."""
    check_format(STORY)


def test_an_empty_log_is_a_valid_trace():
    """The trace of an empty event log is valid."""
    check_format([])
    assert entries([], "i") == []


def test_each_event_is_in_the_row_of_its_host_or_slot():
    """Each event is in the row of its host or slot; hosts come in the order of their first events."""
    every = trace_of(STORY)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in every if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in every if e["name"] == "thread_name"}
    assert list(processes.values()) == ["mine", "gpu1", "gpu2"]
    rows = [(processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"]) for e in entries(STORY, "i")]
    assert rows == [
        ("gpu1", "events", "host-added"),
        ("gpu1", "slot 1", "worker-ready"),
        ("gpu1", "slot 0", "worker-ready"),
        ("mine", "events", "world-formed"),
        ("gpu2", "slot 10", "worker-ready"),
        ("mine", "events", "world-formed"),
        ("mine", "events", "training"),
        ("gpu1", "slot 0", "worker-lost"),
        ("mine", "events", "training"),
        ("gpu1", "slot 0", "worker-ready"),
        ("mine", "events", "job-succeeded"),
    ]
    lost = next(e for e in entries(STORY, "i") if e["name"] == "worker-lost")
    assert lost["args"] == {"text": "gpu1/0#1 died", "worker": "gpu1/0#1", "generation": 2}


def test_the_phases_of_a_recovery_follow_one_another():
    """The phases of a recovery follow one another, from the failure to the first step."""
    end = round((NOON + 5.2) * 1_000_000)
    assert [(name, begin - end, stop - end) for name, begin, stop in spans(STORY) if begin > end - 200_000] == [
        ("generation 3", -110_000, 0),
        ("detect", -105_000, -100_000),
        ("abort", -100_000, -85_000),
        ("form", -85_000, -45_000),
        ("sync", -45_000, -35_000),
        ("first step", -35_000, 0),
    ]


def test_the_phase_prepare_precedes_its_reconfiguration():
    """The phase `prepare` precedes its reconfiguration; the first phase is cut where the sum exceeds the whole."""
    end = round((NOON + 4.02) * 1_000_000)
    found = [(name, begin - end, stop - end) for name, begin, stop in spans(STORY) if end - 500_000 < begin <= end]
    assert found == [
        ("prepare", -472_000, -72_000),
        ("generation 2", -72_000, 0),
        ("leave", -72_000, -55_000),
        ("form", -55_000, -25_000),
        ("sync", -25_000, -15_000),
        ("first step", -15_000, 0),
    ]
    sync = next(e for e in entries(STORY, "X") if e["name"] == "leave")
    assert sync["args"] == {"ms": 20.0}, "the argument is the measured time"


def test_a_generation_s_change_is_drawn_once():
    """Of two records of one change the one with more phases is trace_of, whichever comes first."""
    assert [name for name, *_ in spans(STORY) if name.startswith("generation")] == [
        "generation 1",
        "generation 2",
        "generation 3",
    ]
    early = [STORY[6], EventRecord(NOON + 4.03, "world-formed", "", generation=2, took=GROWN)]
    assert [name for name, *_ in spans(early) if name.startswith("generation")] == ["generation 2"]
    assert "first step" in [name for name, *_ in spans(early)]


def test_unknown_phases_are_drawn_too():
    """Phases with unknown names are trace_of too."""
    took = {"first step": 5.0, "thaw": 10.0, "stretch": 20.0, "form": 30.0, "all": 80.0}
    story = [EventRecord(NOON, "training", "", generation=1, took=took)]
    check_format(story)
    names = [name for name, *_ in sorted(spans(story), key=lambda span: span[1])]
    assert names == ["generation 1", "form", "thaw", "stretch", "first step"]


def test_changes_that_follow_at_once_do_not_overlap():
    """Spans of changes that follow at once do not overlap, also if the clock was set back between them."""
    took = {"prepare": 300.0, "abort": 50.0, "form": 60.0, "all": 100.0}
    story = [
        EventRecord(NOON + at, "training", "", generation=e, took=took) for e, at in [(1, 0.0), (2, 0.05), (3, 0.02)]
    ]
    check_format(story)
    whole = [(begin, end) for name, begin, end in spans(story) if name.startswith("generation")]
    assert len(whole) == 3
    assert all(one[1] <= other[0] for one, other in pairwise(whole))


def test_the_world_s_size_is_a_counter():
    """The trace has a counter of the world's size, with a point at each change."""
    sizes = [(e["ts"], e["args"]["workers"]) for e in entries(STORY, "C")]
    assert sizes == [(0, 0), (2_000_000, 2), (4_000_000, 3), (5_000_000, 2), (7_000_000, 0)]


@pytest.mark.parametrize("worker", ["lost", "", "gpu/7"])
def test_a_worker_of_any_name_gets_a_row(worker):
    """A worker of any name gets a row."""
    check_format([EventRecord(NOON, "worker-ready", "it is ready", worker=worker)])


def test_the_trace_names_its_beginning():
    """Times count from the first event or, if it began earlier, the first phase, and the trace names that time."""
    assert trace_of(STORY)["otherData"] == {"cluster": "mine", "begun": NOON}
    alone = trace_of([EventRecord(NOON, "training", "", generation=1, took={"all": 250.0})])
    assert alone["otherData"]["begun"] == NOON - 0.25
