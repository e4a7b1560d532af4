"""What clients see of batch jobs that have not started, with fake programs of Slurm."""

from __future__ import annotations

import io
import os
import re

import pytest

import nbelastic as nbe
from nbelastic.client import progress
from nbelastic.core.reasons import Missing, Reason
from nbelastic.core.state import ClusterState, Host, HostPhase, Slot
from nbelastic.driver import agents
from nbelastic.driver.status import snapshot
from nbelastic.driver.telemetry import Telemetry
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.ids import HostSpec
from nbelastic.provision import batch
from tests.support.waiting import until


class FakeSlurm:
    """Programs of Slurm that answer what a test has set. Its jobs never start."""

    def __init__(self, folder):
        self._folder = folder
        (folder / "bin").mkdir()
        self._program("sbatch", f'test -e {folder}/refused && cat {folder}/refused >&2 && exit 1; echo "batch job 7"')
        self._program("scontrol", f"cat {folder}/job")
        self._program("scancel", "true")
        self.job("PENDING", "Resources")

    def _program(self, name, commands):
        path = self._folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{commands}\n")
        path.chmod(0o755)

    def job(self, state, reason):
        (self._folder / "new").write_text(f"JobId=7 JobState={state} Reason={reason} ExitCode=0:0\n")
        (self._folder / "new").rename(self._folder / "job")

    def refuse(self, error):
        (self._folder / "refused").write_text(error)

    def accept(self):
        (self._folder / "refused").unlink()


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(agents, "BATCH_JOB_INTERVAL", 0.05)
    monkeypatch.setattr(batch, "POLL", 0.01)
    return FakeSlurm(tmp_path)


@pytest.fixture
def start(start_hostless, fake_slurm):
    return lambda **options: start_hostless(discovery=None, hosts="s0:1", launcher="slurm", **options)


def test_clients_see_why_a_job_is_queued(start, fake_slurm):
    """Though nothing else happens, the status has the queue's word, and the next one. The waits have it with its age."""
    cluster = start()
    reason = lambda: cluster.status().hosts[0].reason
    until(lambda: reason() == "queued (Resources)", what=reason)
    fake_slurm.job("PENDING", "PartitionTimeLimit")
    until(lambda: reason() == "queued (PartitionTimeLimit): the partition allows less time: ask for less with time=")
    with pytest.raises(
        nbe.WaitTimeoutError, match=r"s0 \(queued: PartitionTimeLimit, \d s\); the partition allows less"
    ):
        cluster.wait(1, timeout=0.1)
    until(lambda: ", 2 s)" in cluster.status().reason, what="the age to grow")


def test_a_refused_submission_does_not_hide_what_the_next_job_waits_for(start, fake_slurm):
    """The failure is named as one of the submission. The next job's state comes before it."""
    fake_slurm.refuse("sbatch: error: Unable to contact slurm controller")
    cluster = start(cooldown=(0.5, 1))
    reason = lambda: cluster.status().hosts[0].reason
    refused = "its batch job could not be submitted: sbatch: error: Unable to contact slurm controller"
    until(lambda: reason() == refused, what=reason)
    fake_slurm.accept()
    until(lambda: reason() == f"queued (Resources); before: {refused}", what=reason)


def test_a_stop_says_that_a_job_was_cancelled(start, fake_slurm):
    """The event log has no exit code of a job that never ran."""
    cluster = start()
    until(lambda: cluster.status().hosts[0].reason)
    cluster.stop()
    assert "s0 has left (its batch job was cancelled by nbelastic)" in [event.text for event in cluster.events]


class Terminal(io.StringIO):
    """A terminal that keeps what it was sent."""

    def isatty(self):
        return True


def test_a_terminal_shows_what_a_start_waits_for(start, fake_slurm, monkeypatch):
    """One line, rewritten in place. It is cleared at the end of the wait."""
    shown = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    cluster = start()
    with pytest.raises(nbe.WaitTimeoutError):
        cluster._link.wait_for_start(1.5)
    line = r"\rwaiting: 0 of min 1 workers ready; waiting for s0 \(queued: Resources, \d s\)\x1b\[K"
    assert re.search(line, shown.getvalue())
    assert shown.getvalue().endswith("\r\x1b[K")


def status_of(host, state):
    reason = Reason("too-few", 0, 2, missing=(Missing("host starting", "s0", since=0.0),))
    cluster = ClusterState(Limits(), hosts={"s0": host}, reason=reason)
    return snapshot("c", cluster, Telemetry(batch_jobs={"s0": state}), 12.0)


def test_a_host_that_is_up_has_no_queue():
    """The last state of its job is not shown, though the driver has asked for it just before."""
    host = Host(HostSpec("s0", 1), 0, (Slot(),), phase=HostPhase.UP)
    assert status_of(host, "queued (Resources)").hosts[0].reason == ""


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("queued (0/3 nodes are available: no GPU)", "s0 (queued: 0/3 nodes are available: no GPU, 12 s)"),
        ("queued (JobHeldUser)", "s0 (queued: JobHeldUser, 12 s); the job is held: run `scontrol release`"),
        ("running", "s0 (running, 12 s)"),
        ("", "s0 to start"),
    ],
)
def test_the_reason_names_the_state_of_a_job(state, shown):
    """With advice if waiting cannot help. A successor also shows whose place it takes."""
    host = Host(
        HostSpec("s0", 1), 0, (Slot(),), phase=HostPhase.STARTING, reason="it takes the place of s2", failures=1
    )
    status = status_of(host, state)
    assert status.reason.startswith(f"0 of min 2 workers ready; waiting for {shown}")
    assert status.hosts[0].reason.endswith("it takes the place of s2")
    assert status.hosts[0].reason.startswith(state)
    assert "before" not in status.hosts[0].reason
