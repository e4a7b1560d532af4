"""SIGUSR1 in a Slurm job, with a fake program instead of squeue."""

from __future__ import annotations

import os
import signal
import time

import pytest

from nbelastic.agent.time_limit import seconds_left, watch
from tests.support.waiting import until


@pytest.fixture
def fake_squeue(tmp_path, monkeypatch):
    """`fake_squeue(answer)` has squeue give this answer."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    old = signal.getsignal(signal.SIGUSR1)

    def make(answer):
        (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '{answer}'\n")
        (tmp_path / "squeue").chmod(0o755)

    yield make
    signal.signal(signal.SIGUSR1, old)


@pytest.mark.parametrize(
    ("answer", "within"),
    [("2:00", 105.0), ("0:05", 0.0), ("4:59:00", 285.0), ("1-00:00:00", 285.0), ("UNLIMITED", 285.0), ("", 285.0)],
)
def test_the_announced_end_is_the_real_one(fake_squeue, answer, within):
    """A limit that the partition has set may end the job sooner than `successor` says. It is never announced as later."""
    fake_squeue(answer)
    notices = []
    watch(300.0, notices.append)
    os.kill(os.getpid(), signal.SIGUSR1)
    until(lambda: notices, what="the notice")
    assert notices == [(within, "the time limit of its job")]


def test_without_an_answer_the_variable_of_newer_versions_counts(fake_squeue):
    """Also if a node has no squeue. Outside of a job nothing is known."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 100)}
    assert 95 < seconds_left(job) <= 100
    assert seconds_left({"SLURM_JOB_ID": "7"}) is None
    assert seconds_left({}) is None
