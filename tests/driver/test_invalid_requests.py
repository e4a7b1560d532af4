"""Unusual or invalid requests and texts: each fails at most its own call."""

from __future__ import annotations

import numpy as np
import pytest

import nbelastic as nbe
from nbelastic.core import commands as cmd
from nbelastic.protocol import client_messages as u
from nbelastic.protocol import requests as r
from tests.driver.hostless_cluster import NoHosts
from tests.driver.raw_client import in_driver
from tests.support.waiting import until


def test_a_text_that_is_not_unicode_is_shown(start_hostless):
    """A file name that is not Unicode is shown with a replacement character, and later updates arrive."""
    cluster = start_hostless()
    in_driver(cluster, lambda driver: driver.record(cmd.Record("noted", "no file 'a\udcffb'")))
    until(lambda: "no file 'a?b'" in [event.text for event in cluster.events])
    cluster.scale(2, 3)
    assert cluster.status().min == 2


def test_numbers_of_other_libraries_are_numbers(start_hostless):
    """numpy's numbers are accepted; a value that cannot be sent is refused in one line."""
    cluster = start_hostless(min=np.int64(3), silence=np.float32(8))
    assert cluster.status().min == 3
    cluster.scale(np.int32(2))
    assert cluster.status().min == 2
    with pytest.raises(nbe.UsageError, match="the request is invalid: Expected `int"):
        cluster.scale(max=1 << 70)
    with pytest.raises(nbe.UsageError, match=r"cannot be sent to the driver: <object .*> cannot be sent"):
        cluster.scale(max=object())


def test_an_invalid_answer_ends_the_connection(start_hostless, monkeypatch, caplog):
    """After an invalid answer every waiting call raises, so that none waits without end."""
    cluster = start_hostless()
    monkeypatch.setitem(r.ANSWERS, r.Scale, list[int])
    with pytest.raises(nbe.ClusterStoppedError, match="the connection to its driver failed"):
        cluster.scale(2, 3)
    assert {record.message for record in caplog.records if record.exc_info} == {
        "the connection to the driver of 'quiet' has a fault"
    }
    assert cluster.status().phase == "finished"
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as again:
        assert again.status().min == 2
        again.stop()


@pytest.mark.parametrize(
    "call",
    [
        lambda cluster: cluster.scale(max="3"),
        lambda cluster: cluster.wait("2"),
        lambda cluster: cluster.restart(3),
        lambda cluster: cluster.remove_host(None),
        lambda cluster: cluster.execute("1", setup=True, key=5),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused(start_hostless, call):
    """An argument of a wrong type is refused in one line, and the cluster is unchanged."""
    cluster = start_hostless()
    with pytest.raises(nbe.UsageError, match="the request is invalid: Expected"):
        call(cluster)
    cluster.scale(2, 3)
    assert cluster.status().min == 2


def test_a_total_of_more_than_64_bits_is_ignored(start_hostless):
    """A reported total that exceeds 64 bits is ignored, and updates continue."""
    cluster = start_hostless()
    in_driver(cluster, lambda driver: driver.telemetry.add_report({"total": 1e30, "loss": 0.5}))
    cluster.scale(2, 3)
    assert (cluster.status().total, cluster.status().report) == (None, {"loss": 0.5})


def test_a_request_that_is_too_long_is_refused(start_hostless):
    """A request beyond the size limit is refused, and the cluster is unchanged."""
    cluster = start_hostless()
    with pytest.raises(nbe.UsageError, match=r"it has \d+ bytes, and the limit is 16777216"):
        cluster.restart("x" * (u.LONGEST + 1))
    cluster.scale(2, 3)
    assert cluster.status().min == 2
