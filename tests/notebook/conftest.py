"""An IPython shell with the magics, and a fake cluster for them."""

from __future__ import annotations

import pytest
from fake_cluster import FakeCluster, FakeJob
from IPython.core.interactiveshell import InteractiveShell

from nbelastic.errors import UsageError
from nbelastic.notebook.magics import ElasticMagics


@pytest.fixture
def ip(monkeypatch):
    monkeypatch.setattr(InteractiveShell, "initialized", lambda: True)
    shell = InteractiveShell()
    monkeypatch.setattr(InteractiveShell, "instance", lambda: shell)
    shell.displayed = []
    shell.display_pub.publish = lambda data, *_, **__: shell.displayed.append(data)
    yield shell
    shell.history_manager.end_session()


def attach(name):
    """A kept cluster with this name, and its job."""
    if name == "missing":
        raise UsageError("there is no cluster 'missing' here: you have none on this machine.")
    cluster = FakeCluster(name=name)
    cluster.start()
    cluster.job = FakeJob()
    return cluster


@pytest.fixture
def magics(ip):
    magics = ElasticMagics(ip, create=FakeCluster, attach=attach)
    magics.register()
    yield magics
    magics.unregister()


@pytest.fixture
def cluster(ip, magics):
    ip.run_line_magic("elastic_start", "--min 1 --max 4 --hosts localhost:2")
    return magics.cluster
