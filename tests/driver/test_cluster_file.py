"""Cluster files: how a terminal finds the cluster whose driver listens at a port."""

from __future__ import annotations

import pytest

from nbelastic.errors import UsageError
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.transport import cluster_file
from nbelastic.transport.cluster_file import ClusterFile
from nbelastic.transport.keys import Keys


def test_a_damaged_file_of_another_cluster_is_skipped(clusters_folder):
    """A cluster is found by its port, although the files of two other clusters are damaged or readable by others."""
    files = {}
    for name in ("a", "b", "c"):
        RunFolder(name).path.mkdir(mode=0o700)
        files[name] = RunFolder(name).path / cluster_file.NAME
    files["a"].write_text("{")
    files["a"].chmod(0o600)
    mine = ClusterFile("b", "tcp://127.0.0.1:4711", Keys.make().for_clients(), 10.0)
    mine.write(files["b"])
    mine.write(files["c"])
    files["c"].chmod(0o644)
    assert cluster_file.find("127.0.0.1:4711") == mine
    with pytest.raises(UsageError, match="no cluster of this machine listens on port 4712"):
        cluster_file.find("127.0.0.1:4712")
