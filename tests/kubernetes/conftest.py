"""Fixtures: a fake Kubernetes with two nodes, and a training on its pods."""

from __future__ import annotations

from pathlib import Path

import pytest

import nbelastic as nbe
from tests.kubernetes.fake_api import running_api
from tests.kubernetes.fake_kubelet import IMAGE, FakeNodes
from tests.process.programs import train
from tests.process.training import Training
from tests.support.waiting import until

ROLES = Path(__file__).parents[2] / "docs" / "kubernetes"


@pytest.fixture
def api(tmp_path, monkeypatch):
    """A Kubernetes API to which the kubeconfig leads, with the rights that the documentation names."""
    with running_api() as found:
        found.allow_only("---\n".join(file.read_text() for file in ROLES.glob("*.yaml")))
        monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig(tmp_path / "kubeconfig")))
        yield found


@pytest.fixture
def nodes(api):
    """Two nodes with four GPUs each, which run pods as processes."""
    found = FakeNodes(api, {"node1": 4, "node2": 4})
    yield found
    found.close()


@pytest.fixture
def start(nodes, tmp_path):
    """Start a cluster whose hosts are pods. At the end nothing is left in the namespace."""
    started = []

    def begin(hosts="one:1,two:1", *, wait=True, launcher_options=None, **options):
        launched = {"image": IMAGE, "connect": "direct", **(launcher_options or {})}
        options = {"silence": 3, "cooldown": (0, 0), "log_dir": tmp_path / "logs", "stop_timeout": 5, **options}
        cluster = nbe.Cluster(hosts, launcher="kubernetes", launcher_options=launched, **options)
        started.append(cluster)
        return cluster.start(wait=wait, timeout=60)

    yield begin
    for cluster in started:
        cluster.stop()
    until(lambda: not nodes.api.names() and not nodes.api.names("secrets"), what=lambda: str(nodes.api.objects))
    until(lambda: not nodes.running())


@pytest.fixture
def trains(start, tmp_path):
    """Start a training on pods: `trains("one:2,two:1")`."""
    return lambda *args, **options: Training(start(*args, **options), tmp_path / "steps", train)
