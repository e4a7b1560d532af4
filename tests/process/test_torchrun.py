"""The torchrun of a terminal joins a cluster, trains with it, and leaves, or prints in one line why it cannot join."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

import nbelastic as nbe
from nbelastic.transport.keys import Keys
from tests.process.script_training import (
    MANY_STEPS,
    REPORT,
    TRAIN,
    ScriptTraining,
    join_options,
    reports_by_rank,
    torchrun,
)
from tests.support.waiting import until


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nbe.Cluster]:
    """One host with one slot, and room for two more workers."""
    options = {"max": 3, "cooldown": (0, 0), "log_dir": tmp_path_factory.mktemp("logs")}
    with nbe.Cluster("localhost:1", **options) as cluster:
        yield cluster


@pytest.mark.soak(share=0.2)
def test_two_terminals_and_a_host_train_together(lone, tmp_path):
    """The torchruns of terminals become hosts with ranks; one is killed, one leaves cleanly, one ends with the script."""
    training = ScriptTraining(lone, tmp_path / "training")
    training.wait_for_world(1)
    command = (*join_options(lone.connection_file(), "--max-restarts=3"), TRAIN, training.folder, MANY_STEPS)
    # at the same time, since each change makes all of them import torch again
    with torchrun(*command) as first, torchrun(*command) as second:
        rows = training.wait_for_world(3)
        names = [host.name for host in lone.hosts]
        assert names[0] == "localhost"
        assert sorted(row.host for row in rows) == sorted(names)
        assert {name.rpartition("-")[2] for name in names[1:]} == {str(first.pid), str(second.pid)}
        os.killpg(second.pid, signal.SIGKILL)
        training.wait_for_world(2)
        assert [host.name.rpartition("-")[2] for host in lone.hosts] == ["localhost", str(first.pid)]
        first.send_signal(signal.SIGINT)
        training.wait_for_world(1)
        assert first.wait(20) != 0
    with torchrun(*command) as third:
        training.wait_for_world(2)
        lines = training.finish()
        assert third.wait(20) == 0
    assert {line["restarts"] for line in lines} == {0}
    until(lambda: len(lone.hosts) == 1, what="the external node to leave")


@pytest.mark.soak(seconds=9)
def test_a_worker_of_a_terminal_fails(lone, tmp_path):
    """A failing worker restarts all; when no restarts are left, its error is the job's error, with its rank and host."""
    job = lone.run_script(REPORT, tmp_path, "raise=none", max_restarts=1)
    with torchrun(*join_options(lone.connection_file(), "--max-restarts=3"), REPORT, tmp_path, "raise=any") as run:
        # the node that joins first has rank 0
        with pytest.raises(nbe.JobError, match=r"rank [01] on torchrun-") as caught:
            job.result(timeout=60)
        assert run.wait(20) != 0
        assert f"{job.name} failed: rank {caught.value.rank} on torchrun-" in run.stdout.read()
    assert len(reports_by_rank(tmp_path, restarts=1)) == 2


@pytest.mark.soak(share=0.2)
def test_a_terminal_waits_for_a_script(lone, tmp_path):
    """A torchrun with a job's name as id waits for that job and joins it; when it is removed, it ends cleanly."""
    name = f"job-{int(lone.job.name.partition('-')[2]) + 1 if lone.job else 1}"
    with torchrun(*join_options(lone.connection_file(), f"--rdzv-id={name}"), TRAIN, tmp_path / "t", MANY_STEPS) as run:
        until(lambda: len(lone.hosts) == 2, what="the external node")
        assert lone.hosts[1].reason == "torchrun: waits for a script"
        training = ScriptTraining(lone, tmp_path / "t")
        assert training.job.name == name
        training.wait_for_world(2)
        lone.remove_host(lone.hosts[1].name)
        training.wait_for_world(1)
        assert run.wait(20) == 0
        assert "removed by you" in run.stdout.read()
    training.finish()


@pytest.mark.soak(seconds=7)
def test_a_full_cluster(lone, tmp_path):
    """A torchrun beyond `max` waits as a spare and prints why; `spare=0` ends it at once, `join_timeout` after a while."""
    training = ScriptTraining(lone, tmp_path / "training", nproc=3)
    training.wait_for_world(3)
    for option, error in (("spare=0", "RendezvousClosedError"), ("join_timeout=5", "RendezvousTimeoutError")):
        with torchrun(*join_options(lone.connection_file(), f"--rdzv-conf={option}"), TRAIN, training.folder, 1) as run:
            assert run.wait(40) != 0
            output = run.stdout.read()
        assert error in output
        assert "the cluster is full: 3 of max 3 workers" in output
    assert training.wait_for_world(3)
    assert lone.status().generation == 1
    training.finish()


def test_a_key_of_an_earlier_start(lone, tmp_path):
    """A torchrun with the key of an earlier start prints that its key is not accepted; the cluster does not change."""
    file = tmp_path / "cluster.json"
    content = json.loads(lone.connection_file().read_text())
    for part in ("client", "server"):
        keys = Keys.make()
        changed = {f"{part}_public": getattr(keys, f"{part}_public"), f"{part}_secret": getattr(keys, f"{part}_secret")}
        file.write_text(json.dumps({**content, "keys": {**content["keys"], **changed}}))
        file.chmod(0o600)
        with torchrun(*join_options(file), REPORT, tmp_path) as run:
            assert run.wait(40) != 0
            assert "does not accept this key" in run.stdout.read()
    assert len(lone.hosts) == 1


def test_a_file_that_others_can_read_is_refused(lone, tmp_path):
    """A connection file that others can read, or that does not exist, is refused, since it holds keys."""
    copy = tmp_path / "cluster.json"
    copy.write_bytes(lone.connection_file().read_bytes())
    copy.chmod(0o644)
    assert lone.connection_file().stat().st_mode & 0o777 == 0o600
    for file, error in ((copy, "can be read by others"), (tmp_path / "none.json", "No such file")):
        with torchrun(*join_options(file), REPORT, tmp_path) as run:
            assert run.wait(40) != 0
            assert error in run.stdout.read()


@pytest.mark.cold  # here one torchrun starts as users start theirs
@pytest.mark.soak(share=0.2)
def test_a_torchrun_finds_the_keys_by_host_and_port(lone, tmp_path):
    """With `host:port` torchrun finds the keys of the cluster on this machine that listens there."""
    endpoint = json.loads(lone.connection_file().read_text())["address"].removeprefix("tcp://")
    training = ScriptTraining(lone, tmp_path / "training")
    with torchrun(*join_options(endpoint), TRAIN, training.folder, MANY_STEPS) as run:
        training.wait_for_world(2)
        training.finish()
        assert run.wait(40) == 0
