"""Cluster files: how a terminal finds the cluster whose driver listens at a port."""

from __future__ import annotations

import pytest

from nbelastic import clusterfile
from nbelastic.clusterfile import ClusterFile
from nbelastic.core.errors import UsageError
from nbelastic.driver.places import RunDir
from nbelastic.link import Keys


def test_a_damaged_file_of_another_cluster_is_passed_over(own_base):
    """Three clusters run; the files of two are damaged or open to others. The third is found by its port."""
    files = {}
    for name in ("a", "b", "c"):
        RunDir(name).path.mkdir(mode=0o700)
        files[name] = RunDir(name).path / clusterfile.NAME
    files["a"].write_text("{")
    files["a"].chmod(0o600)
    mine = ClusterFile("b", "tcp://127.0.0.1:4711", Keys.make().for_clients(), 10.0)
    mine.write(files["b"])
    mine.write(files["c"])
    files["c"].chmod(0o644)
    assert clusterfile.find("127.0.0.1:4711") == mine
    with pytest.raises(UsageError, match="no cluster of this machine listens at port 4712"):
        clusterfile.find("127.0.0.1:4712")
