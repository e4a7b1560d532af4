"""A cluster at the end of a cell."""

from __future__ import annotations

from types import SimpleNamespace

from fake_cluster import FakeCluster

import nbelastic as nbe
from nbelastic.notebook import shown_dashboards

VIEW = "application/vnd.jupyter.widget-view+json"


def test_a_cluster_is_its_dashboard_in_a_notebook_and_text_in_a_terminal(ip, monkeypatch):
    """All cells that end with it show the same widget. A terminal has no widgets, and makes none."""
    cluster = nbe.Cluster("localhost:2", name="mine")
    text = "<Cluster mine: finished, 0 workers on 0 hosts>"
    assert ip.display_formatter.format(cluster) == ({"text/plain": text}, {})
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=object()))
    first, again = (cluster._repr_mimebundle_() for _ in range(2))
    assert first[VIEW] == again[VIEW]
    assert "Elastic cluster" in first["text/html"]
    shown_dashboards.close_ended(None)


def test_a_front_end_that_was_reloaded_receives_a_widget_of_its_own(monkeypatch):
    """VS Code, once reloaded, does not ask the kernel for its widgets: it could not show that of before.

    A page that is loaded again and again leaves no more than four widgets with updates of their own: those that were shown last.
    """
    cluster = FakeCluster("a:2").start()
    shown = []
    for session in ("first", "first", "second", "third", "first", "fourth", "fifth", "first", "sixth", "first"):
        shell = SimpleNamespace(get_parent=lambda session=session: {"header": {"session": session}})
        monkeypatch.setattr("IPython.get_ipython", lambda shell=shell: shell)
        shown.append(shown_dashboards.dashboard_of(cluster))
    assert shown[0] is shown[1] is shown[-1]
    assert shown[0] is not shown[2]
    assert len(cluster.subscribers) == 4
    cluster.stop()
    shown_dashboards.close_ended(None)
    assert cluster.subscribers == []


def test_the_dashboard_of_a_cluster_that_has_ended_is_closed_when_another_one_is_shown(ip, magics, monkeypatch):
    """Its subscription ends, and with it its thread. Until then it shows the end. That of a cluster that runs stays."""
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=object()))
    first, second, third = (FakeCluster(f"{host}:2").start() for host in "abc")
    shown = [shown_dashboards.dashboard_of(cluster) for cluster in (first, second)]
    assert shown_dashboards.dashboard_of(first) is shown[0]
    first.stop()
    assert len(first.subscribers) == len(second.subscribers) == 1
    shown_dashboards.dashboard_of(third)
    assert (first.subscribers, shown[0].comm) == ([], None)
    assert len(second.subscribers) == len(third.subscribers) == 1
    second.stop()
    ip.run_line_magic("elastic_start", "--no-dashboard")
    assert (second.subscribers, len(third.subscribers)) == ([], 1)
    third.stop()
    shown_dashboards.close_ended(None)
    assert third.subscribers == []
