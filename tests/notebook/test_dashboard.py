"""The dashboard: what it sends to its views, what it accepts from them, and what a notebook stores."""

from __future__ import annotations

import itertools
import json
from typing import get_args, get_type_hints

import comm
import msgspec
import pytest
from fake_cluster import FakeCluster, merge
from ipykernel.comm.comm import BaseComm

from nbelastic.notebook import dashboard_contract as contract
from nbelastic.notebook import dashboard_frames
from nbelastic.notebook.dashboard import Dashboard
from nbelastic.notebook.dashboard_queries import MAX_LINES
from nbelastic.notebook.dashboard_state import MAX_EVENTS
from nbelastic.protocol.output_buffer import Line
from nbelastic.protocol.status import EventRecord, RankStepTimes, StepTimes, WorkerStack

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def cluster():
    return FakeCluster("localhost:2", min=1, max=4).start()


@pytest.fixture
def dashboard(cluster, monkeypatch):
    """It is connected to a view: what ipykernel provides, once it is imported, sends nothing outside a kernel."""
    monkeypatch.setattr(comm, "create_comm", comm.DummyComm)
    dashboard = Dashboard(cluster)
    yield dashboard
    dashboard.close()


def click(dashboard, content):
    """A custom message, as the browser sends it."""
    dashboard._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})


def shown_state(dashboard):
    """The state that a view shows: the key frame with its change."""
    change = dashboard.change
    return merge(dashboard.state, change["patch"]) if change.get("base") == dashboard.state["n"] else dashboard.state


def test_the_state_is_plain_json_for_all_reports(cluster, dashboard):
    """A loss that is NaN, an unlimited max and markup are sent; fields without a use in the view are not."""
    cluster.record("world-formed", "<b>1</b>", took=3.5)
    cluster.update(report={"loss": float("nan"), "lr": 0.1}, max=None, reason="<script>alert(1)</script>")
    state = json.loads(json.dumps(dashboard.state, allow_nan=False))
    assert state["report"] == {"loss": "nan", "lr": 0.1}
    assert state["max"] is None
    assert state["reason"] == "<script>alert(1)</script>"
    assert "/logs" not in json.dumps(state)
    assert state["events"][-1]["took"] == {"took": 3.5}


def test_messages_have_the_types_of_the_contract(cluster, dashboard, replies):
    """The state, the answers to all queries, and the requests that a view may send."""
    cluster.run_cell("").lines = [("a/0#1", Line(1, "out", "a line", 0))]
    cluster.shown_stacks = [WorkerStack("a/0#1", 0, "train.py:9", "all_reduce"), WorkerStack("b/1#1", None, "", "")]
    cluster.shown_step_times = StepTimes(5.0, 100.0, (RankStepTimes("a/0#1", 0, (8.0, None), "is slow"),))
    cluster.run_for_show()
    state = json.loads(json.dumps(dashboard.state))
    assert dashboard_frames.KeyFrame.__annotations__.keys() == state.keys()
    msgspec.convert(state, dashboard_frames.KeyFrame)
    for ask, answer in get_type_hints(contract.Answers).items():
        click(dashboard, {"ask": ask, "id": ask, "since": 0})
        sent = json.loads(json.dumps(replies.pop()))
        assert (sent.pop("reply"), sent.keys()) == (ask, answer.__annotations__.keys())
        msgspec.convert(sent, answer)
    tags = [request.__struct_config__.tag for request in get_args(contract.AnyRequest)]
    assert tags == ["add_host", "remove_host", "restart", "scale", "pause", "resume", "stop_job", "stop"]


def test_only_the_last_events_are_sent_with_their_numbers(cluster, dashboard):
    """`n` shows a view which events are new, however many there were and also when the oldest are dropped."""
    for _ in range(3):
        for i in range(50):
            cluster.record("worker-ready", f"number {i}")
        del cluster.events[:-60]
        cluster.update()
        events = shown_state(dashboard)["events"]
        assert [event["n"] for event in events] == list(range(cluster.count - MAX_EVENTS + 1, cluster.count + 1))
        assert events[-1]["text"] == "number 49"


def test_two_traits_are_synchronized(dashboard):
    """Besides the traits of anywidget and the layout there are the key frame and its change, and no others."""
    own = {name for name in dashboard.keys if not name.startswith("_")} - {"layout", "tabbable", "tooltip"}
    assert own == {"state", "change"}


def test_a_large_cluster_sends_changes(cluster, dashboard, monkeypatch):
    """After the key frame, an update contains only what is new; the key frame is not sent again."""
    cluster.add_host("big:400")
    frame = dashboard.state
    sent = []
    monkeypatch.setattr(dashboard, "send_state", lambda key: sent.append(set(key)))
    cluster.update(step=77, time=cluster.status().time + 1)
    assert dashboard.state is frame
    assert sent == [{"change"}]
    assert dashboard.change["patch"].keys() == {"time", "step"}
    assert shown_state(dashboard)["step"] == 77


def test_an_update_without_changes_is_not_sent(cluster, dashboard, monkeypatch):
    """A new time alone is not a change."""
    monkeypatch.setattr(dashboard, "send_state", lambda key=None: pytest.fail(f"{key} was sent"))
    cluster.update(time=cluster.status().time + 1)


@pytest.fixture
def replies(dashboard, monkeypatch):
    """The answers that were sent to the views."""
    sent = []
    monkeypatch.setattr(dashboard, "send", sent.append)
    return sent


def test_a_view_asks_for_older_events(cluster, dashboard, replies):
    """It gets 400 at a time, up to the oldest that is kept, and the number of the oldest."""
    for i in range(900):
        cluster.record("worker-ready", f"number {i}")
    del cluster.events[:-700]
    oldest, before, seen = cluster.count - 699, None, []
    for i in range(2):
        click(dashboard, {"ask": "history", "id": f"q{i}", "before": before})
        answer = replies.pop()
        assert (answer["reply"], answer["oldest"]) == (f"q{i}", oldest)
        seen = [event["n"] for event in answer["events"]] + seen
        before = seen[0]
    assert seen == list(range(oldest, cluster.count + 1))
    click(dashboard, {"ask": "history", "id": "q", "before": before})
    assert replies.pop()["events"] == []


def test_a_view_gets_new_reports(cluster, dashboard, replies):
    """The whole history, then only new rows; numbers with five digits. The state has no reports but the newest."""
    cluster.history.add((1, 1e9 + 0.123, 1, 2), {"loss": 2.123456789})
    click(dashboard, {"ask": "reports", "id": "r"})
    first = replies.pop()
    assert (first["start"], first["names"], first["rows"]) == (0, ["loss"], [[1, 1e9 + 0.1, 1, 2, 2.1235]])
    cluster.history.add((2, 1e9 + 1, 1, 2), {"loss": 1.5})
    click(dashboard, {"ask": "reports", "id": "r", "version": first["version"], "count": 1})
    second = replies.pop()
    assert (second["version"], second["start"], second["rows"]) == (first["version"], 1, [[2, 1e9 + 1, 1, 2, 1.5]])


def test_a_view_tails_the_output(cluster, dashboard, replies):
    """Of all workers or of one; each query continues after the last answer; without a job there are no lines."""
    click(dashboard, {"ask": "logs", "id": "q", "since": 0})
    nothing = {"job": None, "speakers": [], "lines": [], "unfinished": [], "next": 0, "more": False, "writers": []}
    assert replies.pop() == {"reply": "q", **nothing}
    job = cluster.run_cell("")
    job.lines = [
        (f"a/{n % 2}#1", Line(n, "out" if n % 3 else "err", f"line {n}", n % 2, 100.0 + n)) for n in range(1, 5)
    ]
    job.unfinished = [(f"a/{n}#1", Line(0, "err", "50 %", n)) for n in range(2)]
    click(dashboard, {"ask": "logs", "id": "q", "worker": None, "since": 2})
    answer = replies.pop()
    assert answer["speakers"] == [("a/0#1", 0), ("a/1#1", 1)]
    assert answer["lines"] == [(3, "err", "line 3", [[1, 1]], 103.0), (4, "out", "line 4", [[0, 0]], 104.0)]
    assert answer["unfinished"] == [(0, "err", "50 %", [[0, 1]], 0.0)]
    assert (answer["job"], answer["next"], answer["writers"]) == ("job-1", 4, [("a/0#1", 0), ("a/1#1", 1)])
    click(dashboard, {"ask": "logs", "id": "q", "worker": "a/1#1", "since": 4})
    assert (replies[-1]["lines"], replies.pop()["next"]) == ([], 4)


def test_many_lines_are_sent_in_parts(cluster, dashboard, replies):
    """No line is missing or sent twice, although equal lines are sent once; each part says whether there are more."""
    job = cluster.run_cell("")
    texts = [f"line {n // 2}" if n % 10 else f"only of rank {n % 2}: {n}" for n in range(9000)]
    job.lines = [(f"a/{n % 2}#1", Line(n + 1, "out", text, n % 2)) for n, text in enumerate(texts)]
    since, parts = 0, []
    while not parts or parts[-1]["more"]:
        click(dashboard, {"ask": "logs", "id": "0", "worker": None, "since": since})
        parts.append(replies.pop())
        assert len(parts[-1]["lines"]) <= MAX_LINES
        since = parts[-1]["next"]
    assert [part["more"] for part in parts] == [True, True, False]
    sent = [
        (rank, text)
        for part in parts
        for *_, text, runs, _ in part["lines"]
        for a, b in runs
        for rank in range(a, b + 1)
    ]
    assert sorted(sent) == sorted((n % 2, text) for n, text in enumerate(texts))


def test_equal_lines_of_many_ranks_are_sent_once(cluster, dashboard, replies):
    """64 ranks with 300 lines each are 300 lines, not the last 16 of each."""
    job = cluster.run_cell("")
    numbers = itertools.count(1)
    job.lines = [
        (f"a/{rank}#1", Line(next(numbers), "out", f"step {step}", rank)) for step in range(300) for rank in range(64)
    ]
    click(dashboard, {"ask": "logs", "id": "q", "since": 0})
    answer = replies.pop()
    assert [text for _, _, text, *_ in answer["lines"]] == [f"step {step}" for step in range(300)]
    assert all(runs == [[0, 63]] for *_, runs, _ in answer["lines"])
    assert (answer["next"], answer["lines"][-1][0]) == (64 * 300, 64 * 300)


def test_a_view_that_has_missed_the_key_frame_gets_another_one(cluster, dashboard):
    """A large cluster sends changes only: one query brings the whole state as a new key frame."""
    cluster.add_host("big:400")
    cluster.update(step=77)
    before = dashboard.state
    assert dashboard.change["base"] == before["n"]
    click(dashboard, {"ask": "frame", "id": "f"})
    assert (dashboard.state["n"], dashboard.state["step"], dashboard.change) == (before["n"] + 1, 77, {})


def test_phases_of_a_change_are_sent_in_order(cluster, dashboard):
    """In the driver's order, independent of the order of measurement: the view draws them as they are sent."""
    took = {"all": 9.0, "sync": 1.0, "new": 1.0, "first step": 1.0, "form": 1.0, "leave": 1.0, "prepare": 1.0}
    cluster.events.append(EventRecord(1.0, "training", "first step", took=took))
    cluster.count += 1
    cluster.update()
    order = list(shown_state(dashboard)["events"][-1]["took"])
    assert order == ["prepare", "leave", "form", "sync", "new", "first step", "all"]


def test_a_view_asks_for_the_stacks(cluster, dashboard, replies):
    """Ranks with the same stack are one entry; workers without an answer are named."""
    cluster.shown_stacks = [
        WorkerStack("a/0#1", 0, "train.py:9", "all_reduce"),
        WorkerStack("a/1#1", 1, "train.py:4 in load", "sleep", "1 commit behind"),
        WorkerStack("b/0#1", 2, "train.py:9", "all_reduce"),
        WorkerStack("b/1#1", None, "", ""),
    ]
    click(dashboard, {"ask": "stacks", "id": "s"})
    assert replies.pop() == {
        "reply": "s",
        "stacks": [
            {"workers": [("a/0#1", 0), ("b/0#1", 2)], "place": "train.py:9", "text": "all_reduce", "note": ""},
            {
                "workers": [("a/1#1", 1)],
                "place": "train.py:4 in load",
                "text": "sleep",
                "note": "1 commit behind",
            },
        ],
        "silent": [("b/1#1", None)],
    }


def test_a_view_asks_for_the_step_times(cluster, dashboard, replies):
    """By rank, with what is said of a slow one. Of many ranks only the last minutes are sent."""
    ranks = (RankStepTimes("a/0#1", 0, (8.123456, 7.0)), RankStepTimes("a/1#1", 1, (None, 74.0), "is 9 times as slow"))
    cluster.shown_step_times = StepTimes(5.0, 100.0, ranks)
    click(dashboard, {"ask": "step_times", "id": "t"})
    assert replies.pop() == {
        "reply": "t",
        "span": 5.0,
        "end": 100.0,
        "rows": [("a/0#1", [8.1235, 7.0]), ("a/1#1", [None, 74.0])],
        "texts": {"1": "is 9 times as slow"},
    }
    cluster.shown_step_times = None
    click(dashboard, {"ask": "step_times", "id": "t"})
    assert replies.pop()["error"] == "the driver does not answer"
    cluster.shown_step_times = StepTimes(
        5.0, 100.0, tuple(RankStepTimes(f"a/{i}#1", i, (1.0,) * 180) for i in range(512))
    )
    click(dashboard, {"ask": "step_times", "id": "t"})
    assert [len(times) for _, times in replies.pop()["rows"]] == [39] * 512


def test_an_unknown_query_is_answered_with_an_error(dashboard, replies):
    """So that the view does not wait for a timeout. `hello` has an empty answer."""
    click(dashboard, {"ask": "me", "id": "x"})
    click(dashboard, {"ask": "logs", "since": "now", "id": "y"})
    click(dashboard, {"ask": "hello", "id": "z"})
    assert replies == [
        {"reply": "x", "error": "unknown query"},
        {"reply": "y", "error": "unknown query"},
        {"reply": "z"},
    ]


@pytest.mark.parametrize(
    "request_",
    [
        {"order": "add_host", "host": "127.0.0.2:2"},
        {"order": "remove_host", "host": "localhost", "now": False},
        {"order": "scale", "min": 1, "max": 2},
        {"order": "restart", "worker": "localhost/0#1"},
        {"order": "pause"},
        {"order": "resume"},
        {"order": "stop_job"},
        {"order": "stop"},
    ],
)
def test_requests_are_passed_to_the_cluster(cluster, dashboard, request_):
    """Unchanged, with the dashboard as their origin."""
    click(dashboard, request_)
    assert ("order", request_, "dashboard") in cluster.calls


@pytest.mark.parametrize("message", [None, "stop", 3, [], {}, {"order": "run"}, {"order": None}, {"order": ["stop"]}])
def test_other_messages_from_the_page_are_dropped(cluster, dashboard, message):
    """They are neither requests nor queries."""
    before = list(cluster.calls)
    click(dashboard, message)
    assert cluster.calls == before


def test_the_stored_output_is_stable_and_readable(cluster, dashboard):
    """The same after any number of steps: no address and no changing number; a widget where widgets are supported."""
    before = dashboard._repr_mimebundle_()
    cluster.run_for_show()
    after = dashboard._repr_mimebundle_()
    assert before == after
    assert after[WIDGET] == {"version_major": 2, "version_minor": 1, "model_id": dashboard.model_id}
    assert after["text/plain"] == repr(dashboard) == "<elastic cluster of 1–4 workers>"
    assert after["text/html"].startswith("<div><strong>Elastic cluster of 1–4 workers.</strong>")


def test_a_cluster_that_ends_leaves_its_last_state(cluster, dashboard):
    """Its phase is finished."""
    cluster.stop()
    assert shown_state(dashboard)["phase"] == "finished"


def test_a_closed_dashboard_has_no_subscription(cluster, dashboard):
    """Closing it again is fine."""
    dashboard.close()
    assert cluster.subscribers == []
    dashboard.close()


def test_clicks_are_answered_while_a_cell_runs(dashboard):
    """ipykernel 7.4 would pass a click to the shell that sent last. It must not, also after the comm was opened again."""
    for opened in (BaseComm(target_name="jupyter.widget"), BaseComm(target_name="jupyter.widget")):
        if not hasattr(opened, "_reply_subshell_for"):
            pytest.skip("this ipykernel routes messages as they come")
        opened._reply_subshell_id = None  # what an update sent from the main shell leaves
        assert opened._reply_subshell_for({"method": "custom"}, "theirs") is None
        dashboard.comm = opened
        assert opened._reply_subshell_for({"method": "custom"}, "theirs") == "theirs"


def test_a_kernel_without_subshells_is_not_changed(dashboard):
    """Older and other kernels do not have the attribute, and do not get it."""

    class PlainComm:
        comm_id = "plain"
        kernel = None
        on_msg = close = lambda self, *_, **__: None

    plain = PlainComm()
    dashboard.comm = plain
    assert vars(plain) == {}
