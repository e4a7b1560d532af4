"""A cluster at the end of a cell."""

from __future__ import annotations

from types import SimpleNamespace

import nbelastic as nbe

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
    cluster._shown.close()
