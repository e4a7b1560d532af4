"""What a notebook shows after Ctrl-C in a call that starts or stops a cluster."""

from __future__ import annotations

import pytest

import nbelastic as nbe
from nbelastic.client import driver_link
from tests.driver.hostless_cluster import NoHosts


def raise_interrupt(*_):
    raise KeyboardInterrupt


def shown(error):
    """The text that IPython shows instead of a traceback. A magic adds one only if there is none."""
    return error.value._render_traceback_()


def test_an_interrupted_stop_does_not_claim_that_the_job_goes_on(start_hostless, monkeypatch):
    """Ctrl-C ends the programs at once. The notebook says so, and the cluster has stopped."""
    cluster = start_hostless()
    finished = cluster._link.connection.finished
    wait = finished.wait

    def wait_for_programs(timeout):
        monkeypatch.setattr(finished, "wait", wait)
        raise_interrupt()

    monkeypatch.setattr(finished, "wait", wait_for_programs)
    with pytest.raises(KeyboardInterrupt) as error:
        cluster.stop()
    assert shown(error) == ["KeyboardInterrupt: the stop no longer waits for the programs: they are killed."]
    assert cluster.status().phase == "finished"


@pytest.mark.parametrize("call", ["pause", "step"])
def test_an_interrupted_pause_says_that_the_training_pauses(start_hostless, monkeypatch, call):
    """Ctrl-C ends the wait only: the request is with the driver. The notebook says so, and how the training goes on."""
    cluster = start_hostless()
    monkeypatch.setattr(driver_link, "wait_for_result", raise_interrupt)
    with pytest.raises(KeyboardInterrupt) as error:
        getattr(cluster, call)()
    assert shown(error) == [
        "KeyboardInterrupt: no longer waiting; the training pauses at a commit, until %elastic_resume lets it go on."
    ]


def test_an_interrupted_start_leaves_nothing_that_could_go_on(clusters_folder, monkeypatch):
    """Ctrl-C while the driver's process starts undoes the start, and the notebook says so."""
    monkeypatch.setattr(driver_link, "start_driver_process", raise_interrupt)
    cluster = nbe.Cluster(name="quiet", discovery=NoHosts())
    with pytest.raises(KeyboardInterrupt) as error:
        cluster.start()
    assert shown(error) == ["KeyboardInterrupt: the start is undone: no cluster runs."]
    assert cluster.status().reason == "not started"
