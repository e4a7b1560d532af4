"""The driver's own code raises an error while workers train."""

from __future__ import annotations

import threading
import time

import pytest

import nbelastic as nbe
from nbelastic.core.step import step
from nbelastic.driver import decisions
from nbelastic.protocol import events as ev
from nbelastic.provision import process_agent
from nbelastic.system.processes import kill_group
from tests.process import programs
from tests.support import driver_thread
from tests.support.processes import leftovers
from tests.support.waiting import until


@pytest.mark.soak(share=0.2)
def test_a_training_goes_on_without_decisions(make, tmp_path, monkeypatch):
    """After a decision raises an error, the same processes make steps for three times the `silence` limit.

    The stop waits until the agent that it kills has ended: else the agent would stay a zombie of the driver's process.
    """

    def broken(world, event, now, **options):
        if isinstance(event, ev.Scaled):
            raise KeyError("a fault")
        return step(world, event, now, **options)

    driver_thread.use_driver_threads(monkeypatch)
    cluster = make("localhost:2", min=2, silence=1.0)
    cluster.run(programs.train, str(tmp_path))
    until(lambda: cluster.status().step > 5)
    pids = {worker.pid for worker in cluster.workers}
    monkeypatch.setattr(decisions, "step", broken)
    with pytest.raises(nbe.ClusterStoppedError, match="KeyError: 'a fault', at Scaled"):
        cluster.scale(2, 2)
    until(lambda: "makes no more decisions" in cluster.status().reason)
    end, made = time.monotonic() + 3.0, cluster.status().step
    until(lambda: time.monotonic() > end and cluster.status().step > made + 20)
    assert {worker.pid for worker in cluster.workers} == pids
    assert [event.kind for event in cluster.events if event.kind in ("worker-lost", "host-lost")] == []
    monkeypatch.setattr(process_agent, "kill_group", lambda pid, _: threading.Timer(0.5, kill_group, [pid]).start())
    cluster.stop()
    assert not leftovers()
