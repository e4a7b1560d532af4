"""The dashboard's contract: what travels down, what comes up, and what a notebook stores."""

from __future__ import annotations

import json

import pytest
from fake_cluster import FakeCluster
from ipykernel.comm.comm import BaseComm

from nbelastic.notebook.dashboard import EVENTS, Dashboard

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def cluster():
    return FakeCluster("localhost:2", min=1, max=4).start()


@pytest.fixture
def dashboard(cluster):
    dashboard = Dashboard(cluster)
    yield dashboard
    dashboard.close()


def click(dashboard, content):
    """A custom message, as the browser sends it."""
    dashboard._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})


def test_the_state_is_plain_json_whatever_was_reported(cluster, dashboard):
    """A loss that is NaN, an unlimited max and markup travel; what the view has no use for does not."""
    cluster.record("world-formed", "<b>1</b>", took=3.5)
    cluster.tell(report={"loss": float("nan"), "lr": 0.1}, max=None, reason="<script>alert(1)</script>")
    state = json.loads(json.dumps(dashboard.state, allow_nan=False))
    assert state["report"] == {"loss": "nan", "lr": 0.1}
    assert state["max"] is None
    assert state["reason"] == "<script>alert(1)</script>"
    assert not {"address", "log_dir"} & {*state["hosts"][0], *state["workers"][0]}
    assert state["events"][-1]["took"] == {"took": 3.5}


def test_only_the_last_events_travel_and_keep_their_numbers(cluster, dashboard):
    """`n` tells a view which events are new, however many there have been and also when the oldest are forgotten."""
    said = len(cluster.events)
    for _ in range(3):
        for i in range(50):
            cluster.record("worker-ready", f"number {i}")
        said += 50
        del cluster.events[:-60]
        cluster.tell()
        events = dashboard.state["events"]
        assert [event["n"] for event in events] == list(range(said - EVENTS + 1, said + 1))
        assert events[-1]["text"] == "number 49"


def test_one_trait_travels(dashboard):
    """Besides anywidget's own and the layout there is `state`, and nothing else."""
    own = {name for name in dashboard.keys if not name.startswith("_")} - {"layout", "tabbable", "tooltip"}
    assert own == {"state"}


@pytest.mark.parametrize(
    "order",
    [
        {"order": "add_host", "host": "127.0.0.2:2"},
        {"order": "remove_host", "host": "localhost", "now": False},
        {"order": "scale", "min": 1, "max": 2},
        {"order": "stop_job"},
        {"order": "stop"},
    ],
)
def test_orders_go_straight_to_the_cluster(cluster, dashboard, order):
    """As they are, with who gave them."""
    click(dashboard, order)
    assert ("order", order, "dashboard") in cluster.calls


@pytest.mark.parametrize("junk", [None, "stop", 3, [], {}, {"order": "run"}, {"order": None}, {"order": ["stop"]}])
def test_junk_from_the_page_reaches_nobody(cluster, dashboard, junk):
    """What is no order is dropped."""
    before = list(cluster.calls)
    click(dashboard, junk)
    assert cluster.calls == before


def test_what_a_notebook_stores_is_stable_and_readable(cluster, dashboard):
    """The same after any number of steps: no address, no number that moves; a widget where there are widgets."""
    before = dashboard._repr_mimebundle_()
    cluster.run_for_show()
    after = dashboard._repr_mimebundle_()
    assert before == after
    assert after[WIDGET] == {"version_major": 2, "version_minor": 1, "model_id": dashboard.model_id}
    assert after["text/plain"] == repr(dashboard) == "<elastic cluster of 1–4 workers>"
    assert after["text/html"].startswith("<div><strong>Elastic cluster of 1–4 workers.</strong>")


def test_a_cluster_that_ends_leaves_its_last_state(cluster, dashboard):
    """Finished: the view says so and takes no more orders."""
    cluster.stop()
    assert dashboard.state["phase"] == "finished"


def test_a_closed_dashboard_costs_nothing(cluster, dashboard):
    """Closing it ends the subscription; closing it again is fine."""
    dashboard.close()
    assert cluster.subscribers == []
    dashboard.close()


def test_clicks_are_answered_while_a_cell_runs(dashboard):
    """ipykernel 7.4 would hand a click to the shell that last sent; also after the comm was opened anew it must not."""
    for comm in (BaseComm(target_name="jupyter.widget"), BaseComm(target_name="jupyter.widget")):
        if not hasattr(comm, "_reply_subshell_for"):
            pytest.skip("this ipykernel routes messages as they come")
        comm._reply_subshell_id = None  # what an update sent from the main shell leaves
        assert comm._reply_subshell_for({"method": "custom"}, "theirs") is None
        dashboard.comm = comm
        assert comm._reply_subshell_for({"method": "custom"}, "theirs") == "theirs"


def test_a_kernel_without_that_routing_is_left_alone(dashboard):
    """Older and other kernels have no such attribute, and get none."""

    class PlainComm:
        comm_id = "plain"
        kernel = None
        on_msg = close = lambda self, *_, **__: None

    plain = PlainComm()
    dashboard.comm = plain
    assert vars(plain) == {}
