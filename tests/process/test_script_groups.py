"""Worker groups of scripts: workers, nodes and hosts are lost, join and leave."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import nbelastic as nbe
from tests.process.script_training import REPORT, ScriptTraining, join_options, torchrun
from tests.support.processes import agent_of_node, alive, node_pid
from tests.support.waiting import until


@pytest.mark.soak(share=0.2)
def test_a_group_restarts_after_each_loss_and_join(make: Callable[..., nbe.Cluster], tmp_path):
    """After each loss of a worker, node or host, and after a join, all workers restart from the last checkpoint."""
    cooldown = (5, 5)  # the others make steps before the lost host is back
    cluster = make("localhost:2,127.0.0.2:1", min=1, cooldown=cooldown)
    training = ScriptTraining(cluster, tmp_path / "training", max_restarts=1)
    os.kill(training.wait_for_world(3)[2].pid, signal.SIGKILL)
    until(lambda: any("SIGKILL; restart 1 of 1" in event.text for event in cluster.events), what="a restart")
    first = training.wait_for_world(3)[0]
    node = psutil.Process(node_pid(cluster, "localhost"))
    node.kill()  # its workers die with it, and the restart of the node does not count
    until(lambda: not alive(first.pid), what="the workers of the killed node to end")
    until(
        lambda: any("its node ended (SIGKILL)" in event.text for event in cluster.events), what="its end to be reported"
    )
    training.wait_for_world(3)
    agent_of_node(cluster, "127.0.0.2").kill()  # the whole host is lost
    training.wait_for_world(2, timeout=20)
    training.wait_for_world(3)  # the host is tried again
    cluster.add_host("127.0.0.3:1")
    training.wait_for_world(4)
    broken = [event.text for event in cluster.events if event.kind == "world-broken"]
    cluster.remove_host("localhost")  # the host of rank 0
    assert [row.host for row in training.wait_for_world(2)] == ["127.0.0.2", "127.0.0.3"]
    assert [event.text for event in cluster.events if event.kind == "world-broken"] == broken, (
        "a removal does not count"
    )
    lines = training.finish()
    assert max(line["restarts"] for line in lines) == 1, "changes of the membership do not count"


def test_a_frozen_node_is_replaced(make: Callable[..., nbe.Cluster], tmp_path):
    """A stopped node is ended with its workers, and another takes its place."""
    cluster = make("localhost:1,127.0.0.2:1", min=1)
    training = ScriptTraining(cluster, tmp_path / "training")
    before = training.wait_for_world(2)
    os.kill(node_pid(cluster, "127.0.0.2"), signal.SIGSTOP)
    until(lambda: not alive(before[1].pid), what="its worker to end")
    training.wait_for_world(2)
    training.finish()


def test_hosts_that_finish_early_wait_for_the_others(make: Callable[..., nbe.Cluster], tmp_path):
    """The exit barrier: the job ends when the last host has finished, although earlier ones wait only briefly."""
    cluster = make("localhost:1,127.0.0.2:1", min=2)
    job = cluster.run_script(REPORT, tmp_path, "sleep=1.5")
    assert job.result(timeout=60) == [None, None]
    (short := tmp_path / "short").mkdir()
    assert cluster.run_script(REPORT, short, "sleep=1.5", exit_barrier_timeout=0.3).result(timeout=60) == [None, None]


def test_a_closed_cluster(make: Callable[..., nbe.Cluster], tmp_path: Path):
    """When a cluster stops, a torchrun that waits prints that it is closed, and a later one finds no cluster."""
    cluster = make("localhost:1")
    copy = tmp_path / "cluster.json"
    copy.write_bytes(cluster.connection_file().read_bytes())
    copy.chmod(0o600)
    with torchrun(*join_options(copy), REPORT, tmp_path) as run:
        until(lambda: len(cluster.hosts) == 2, what="the external node")
        cluster.stop()
        assert run.wait(40) != 0
        assert "is closed" in run.stdout.read()
    with torchrun(*join_options(copy), REPORT, tmp_path) as run:
        assert run.wait(40) != 0
        assert "nothing listens at" in run.stdout.read()


SAVES = """
import os, signal, sys, time
def save(*_):
    time.sleep(1.5)
    open(f"{sys.argv[1]}/{os.getpid()}.saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(f"{sys.argv[1]}/{os.getpid()}.began", "w").close()
while True:
    time.sleep(0.05)
"""


def test_a_script_saves_at_sigterm_when_its_host_is_removed(make: Callable[..., nbe.Cluster], tmp_path: Path):
    """Its workers end well after that, also on the removed host; the others begin again without waiting for a time limit.

    Workers of a cluster that stops save too.
    """
    (script := tmp_path / "saves.py").write_text(SAVES)
    (folder := tmp_path / "made").mkdir()
    cluster = make("localhost:1,127.0.0.2:1", min=1)
    cluster.wait(2, timeout=60)
    cluster.run_script(script, folder)
    pids = lambda kind: {file.stem for file in folder.glob(f"*.{kind}")}
    until(lambda: len(pids("began")) >= 2, what="two workers")
    cluster.remove_host("localhost")
    until(lambda: len(pids("saved")) >= 2, what="both to save")
    until(lambda: len(pids("began")) >= 3, what="the other to begin again")
    until(lambda: any(event.kind == "host-gone" for event in cluster.events), what="the host to leave")
    cluster.stop()
    assert pids("saved") == pids("began")


ENDS_EARLY = """
import os, sys, time
folder, rank = sys.argv[1], os.environ["RANK"]
open(f"{folder}/{rank}-{os.getpid()}.began", "w").close()
while rank == "0":
    time.sleep(0.05)
"""


@pytest.mark.soak(share=0.2)
def test_a_worker_that_has_ended_well_leaves_no_process(make: Callable[..., nbe.Cluster], tmp_path: Path):
    """As under torchrun. If torch had it wait for the others, and it were killed meanwhile, its host would hang at the next round."""
    (script := tmp_path / "ends.py").write_text(ENDS_EARLY)
    (folder := tmp_path / "made").mkdir()
    cluster = make("localhost:2", min=2)
    cluster.run_script(script, folder, max_restarts=1)
    began = lambda rank: [int(file.stem.partition("-")[2]) for file in folder.glob(f"{rank}-*.began")]
    until(lambda: began(0) and began(1), what="two workers")
    until(lambda: not alive(*began(1)), what="the second one to end")
    os.kill(*began(0), signal.SIGKILL)
    until(lambda: len(began(0)) == len(began(1)) == 2, what="both to begin again")
