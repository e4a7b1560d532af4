"""Faults that a user injects into a real training."""

from __future__ import annotations

import psutil
import pytest

from nbelastic.cli.main import main
from nbelastic.protocol.chaos import KINDS
from tests.support.waiting import until


@pytest.mark.soak(share=0.2)
def test_a_training_survives_injected_faults(trains, capsys):
    """Workers are killed and stopped, and a host's agent is killed. Ctrl-C ends it: nothing stays stopped, nothing is lost.

    A replay of the event log makes the same decisions.
    """
    training = trains("localhost:2,127.0.0.2:2", min=1, chaos=True)
    pids = {w.id: w.pid for w in training.wait_for_world(4)}
    lines = []

    def show(line):
        lines.append(line)
        if all(any(f" {kind} " in each for each in lines) for kind in KINDS):
            raise KeyboardInterrupt

    report = training.cluster.chaos(every=0.4, seed=20, on_line=show, by="a test")
    assert report.ended == "interrupted"
    assert {fault.kind for fault in report.faults} == set(KINDS), lines
    assert report.not_survived == ()
    assert report.steps_lost == 0
    assert 0 < report.goodput < 1
    assert max(fault.recovery or 0 for fault in report.faults) <= report.longest_without_step + 1e-6
    hit = [fault.worker for fault in report.faults if fault.worker in pids]
    assert hit
    until(lambda: not any(map(psutil.pid_exists, (pids[w] for w in hit))), what="the workers that were hit to end")
    assert all(psutil.Process(w.pid).status() != psutil.STATUS_STOPPED for w in training.wait_for_world(4, timeout=30))
    training.finish()
    assert main(["replay", str(training.cluster.log_dir / "events.jsonl")]) == 0
    replayed = capsys.readouterr().out
    assert f"record worker-lost: {hit[0]}" in replayed
    assert "differs" not in replayed
    assert "cut off" not in replayed
