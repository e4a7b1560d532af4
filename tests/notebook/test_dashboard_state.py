"""Key view_state and changes: with both, a view shows the whole state, and updates are small."""

from __future__ import annotations

import json
import sys

import pytest
from fake_cluster import merge
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.notebook.dashboard_state import DashboardState, key_frame, merge_patch
from nbelastic.protocol.status import (
    CopiesStatus,
    EventRecord,
    GpuStatus,
    HostStatus,
    RequestStatus,
    Status,
    WorkerCopies,
    WorkerStatus,
)
from tests.support.soak import examples

LEAVES = st.none() | st.integers(0, 3) | st.sampled_from("ab") | st.lists(st.integers(0, 2), max_size=2)
NAMES = st.sampled_from("xyz")
VALUES = st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=8)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=3)


def without_none(value):
    """Remove each None: a view treats it as missing."""
    return {k: without_none(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


@settings(max_examples=examples(200))
@given(OBJECTS, OBJECTS)
def test_a_patch_turns_the_old_state_into_the_new_one(old, new):
    """For any two states; the patch of equal states is empty."""
    assert without_none(merge(without_none(old), merge_patch(old, new))) == without_none(new)
    assert merge_patch(new, new) == {}


GPUS = tuple(GpuStatus(f"GPU-{n}", 97, 71_000, 81_559, 71) for n in range(8))


def large(hosts=64, slots=8, step=0):
    """A cluster with eight GPUs per host, in the middle of a long training, with names of usual length."""
    rows = [
        HostStatus(f"gpu-node-{h:03}", f"10.20.30.{h}", slots, "up", "", 0.0, 55.5, 200_000_000_000, 512_000_000_000)
        for h in range(hosts)
    ]
    rows = [HostStatus(*(getattr(row, name) for name in row.__struct_fields__[:9]), gpus=GPUS[:slots]) for row in rows]
    workers = [
        WorkerStatus(
            f"{row.name}/{s}#3",
            row.name,
            s,
            h * slots + s,
            s,
            3_900_000 + s,
            "running",
            step,
            2,
            "/logs",
            "",
            101.5,
            9e9,
            gpu=f"GPU-{s}",
        )
        for h, row in enumerate(rows)
        for s in range(slots)
    ]
    curve = tuple(2.3 / (i + 1) for i in range(100))
    return Status(
        "large",
        "running",
        "512 workers train in generation 12",
        12,
        512,
        8,
        None,
        tuple(rows),
        tuple(workers),
        "job-1",
        "",
        step,
        {"loss": 0.23, "accuracy": 0.9},
        12.5,
        curves={"loss": curve, "accuracy": curve},
        time=1.7e9 + step,
        orders=(RequestStatus("v-1", "dashboard", "add gpu-node-099:8"),) * 8,
    )


EVENTS = [
    EventRecord(1.7e9 + i, "world-formed", "world of 512 at generation 12" * 3, generation=12, took={"form": 1.5})
    for i in range(40)
]


def size(value):
    return len(json.dumps(value, separators=(",", ":")))


def test_64_hosts_of_8_slots_fit_into_50_kilobytes():
    """With all hosts, workers, curves, events and requests."""
    assert size(key_frame(large(), EVENTS, 40)) <= 50_000


def test_a_step_of_a_large_cluster_is_a_small_change():
    """The change has the step and little else; a view shows the same as with the whole state."""
    view_state = DashboardState()
    view_state.update(large(), EVENTS, 40)
    for step in range(1, 20):
        assert view_state.update(large(step=step), EVENTS, 40)
        assert view_state.state["n"] == 1
        assert size(view_state.change) < 200
        assert merge(view_state.state, view_state.change["patch"])["step"] == step


def test_when_much_has_changed_there_is_a_new_key_frame():
    """If a change is larger than half of the whole state, the whole state is sent, and changes start again from it."""
    view_state = DashboardState()
    view_state.update(large(), EVENTS, 40)
    assert view_state.update(large(hosts=20), EVENTS, 40)
    assert view_state.state["n"] == 1
    assert view_state.update(large(hosts=64, slots=4), EVENTS, 40)
    assert view_state.update(large(hosts=10, slots=2), EVENTS, 40)
    view = view_state.state if not view_state.change else merge(view_state.state, view_state.change["patch"])
    assert len(view["hosts"]) == 10


def test_a_small_cluster_is_sent_whole():
    """There are no changes to apply then."""
    view_state = DashboardState()
    for n in (1, 2, 3):
        view_state.update(large(hosts=2, slots=2, step=n), EVENTS[:3], 3)
        assert (view_state.state["n"], view_state.state["step"], view_state.change) == (n, n, {})


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.123456789, 0.12346),
        (1234567.0, 1234567.0),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        (sys.float_info.max, sys.float_info.max),
    ],
)
def test_numbers_are_as_exact_as_they_are_shown(value, shown):
    """Numbers that JSON does not have are sent as text."""
    status = Status("s", "running", "", 1, 0, 1, None, (), (), None, "", report={"loss": value})
    assert key_frame(status, [], 0)["report"] == {"loss": shown}


def test_the_end_of_a_back_off_does_not_change():
    """The remaining seconds shrink from status to status. The time of the end stays, so no update is sent."""
    view_state = DashboardState()
    for passed in (0.0, 1.0, 2.5):
        host = HostStatus("a", "", 1, "backoff", "", 5.0 - passed, slots_in_backoff={0: 5.0 - passed})
        status = Status("s", "waiting", "", 0, 0, 1, None, (host,), (), None, "", time=100.0 + passed)
        assert view_state.update(status, [], 0) == (passed == 0.0)
    assert (
        view_state.state["hosts"]["a"]["backoff_until"]
        == view_state.state["hosts"]["a"]["slots_backoff_until"]["0"]
        == 105.0
    )


def test_the_copies_of_a_sharded_model_are_shown_by_slot():
    """Memory in MB, rounded up; ids of workers without their incarnation. Other jobs have none."""
    workers = [
        WorkerStatus(f"a/{s}#2", "a", s, s, s, 1, "running", 9, 0, "", copies=copies)
        for s, copies in enumerate([WorkerCopies(1_500_001, ("b/0#1",), ("a/1#2", "c/0#1"), shared=True), None])
    ]
    hosts = (HostStatus("a", "", 2, "up", "", 0.0),)
    copies = CopiesStatus(8, 99.04, 0.4251, 3_000_000, 1)
    status = Status("s", "running", "", 1, 2, 1, None, hosts, tuple(workers), "job-1", "", copies=copies)
    view = key_frame(status, [], 0)
    assert view["hosts"]["a"]["copies"] == {"0#2": (2, ["b/0"], ["a/1", "c/0"], True)}
    assert view["copies"] == {"commit": 8, "made_at": 99.0, "seconds": 0.43, "memory": 3, "workers": 1}
    assert key_frame(Status("s", "running", "", 1, 0, 1, None, hosts, (), None, ""), [], 0)["copies"] is None
