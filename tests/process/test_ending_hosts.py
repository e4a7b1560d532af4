"""Hosts that are announced to end: SIGTERM to their agents, as batch systems, Kubernetes and administrators send it."""

from __future__ import annotations

import os
import signal
import tempfile

import psutil
import pytest

from nbelastic.cli.main import main
from tests.support import soak
from tests.support.processes import alive
from tests.support.waiting import until

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


def agent_of(cluster, host):
    """The agent of a host with a worker; the template is between them."""
    worker = next(w for w in cluster.workers if w.host == host and w.pid)
    return psutil.Process(worker.pid).parent().parent().pid


def has_left(cluster, host):
    return host not in [each.name for each in cluster.hosts]


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.soak(seconds=25))])
@pytest.mark.timeout(900)
def test_sigterm_costs_no_step(trains, rounds):
    """The workers of one host after the other leave at a commit, rank 0's too. Each step is made once; nothing is lost."""
    training = trains(",".join(f"{host}:1" for host in HOSTS), min=1)
    for number in range(rounds if rounds == 2 else soak.repetitions(rounds)):
        host = HOSTS[number % 3]
        training.wait_for_world(3)
        agent = agent_of(training.cluster, host)
        os.kill(agent, signal.SIGTERM)
        until(lambda host=host: has_left(training.cluster, host))
        until(lambda agent=agent: not alive(agent))
        training.cluster.add_host(f"{host}:1")
    training.wait_for_world(3)
    training.finish()
    assert not {"world-broken", "host-lost", "worker-lost", "slot-backoff"} & {
        event.kind for event in training.cluster.events
    }


def test_a_second_sigterm_ends_the_agent_at_once(trains):
    """An agent whose worker cannot leave, as it alone holds the state, ends with it long before the announced time."""
    training = trains("127.0.0.2:1", min=1)
    (victim,) = training.wait_for_world(1)
    agent = agent_of(training.cluster, "127.0.0.2")
    os.kill(agent, signal.SIGTERM)
    until(lambda: [host.ends_in is not None for host in training.cluster.hosts] == [True])
    os.kill(agent, signal.SIGTERM)
    until(lambda: not alive(victim.pid) and not alive(agent))
    until(lambda: has_left(training.cluster, "127.0.0.2"))
    assert "no worker is left that holds the training state" in str(training.job.exception(timeout=20))


def test_the_last_host_is_saved_in_a_checkpoint(trains, tmp_path):
    """Without another host the job is stopped before its only host ends, and its last commit is in a checkpoint."""
    kept = tmp_path / "kept"
    checkpoints = {"checkpoint": kept, "checkpoint_every": 10**6}
    training = trains("127.0.0.2:1", kwargs=checkpoints, min=1, timeouts={"notice": 4.0})
    training.wait_for_world(1)
    os.kill(agent_of(training.cluster, "127.0.0.2"), signal.SIGTERM)
    error = training.job.exception(timeout=30)
    assert "only hosts that end hold the training state: 127.0.0.2" in str(error)
    until(lambda: has_left(training.cluster, "127.0.0.2"))
    lock, checkpoint = sorted(path.name for path in kept.iterdir())
    assert (lock, checkpoint.partition("-commit-")[1]) == (".used-by", "-commit-")


def test_a_machine_is_drained_by_a_command(trains, capsys, tmp_path, monkeypatch):
    """`nbelastic drain` on the machine of several hosts: all leave, the last one when another host has the state."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # it drains all clusters that have this temporary folder
    monkeypatch.setattr(tempfile, "tempdir", None)
    training = trains("127.0.0.2:1,127.0.0.3:1", min=1)
    training.wait_for_world(2)
    assert main(["drain", "--in", "300"]) == 0
    text = "its workers leave at the next commit; it ends in 300 s."
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"127.0.0.2: {text}", f"127.0.0.3: {text}"]
    until(lambda: [host.ends_in is not None for host in training.cluster.hosts] in ([True], [True, True]))
    training.cluster.add_host("127.0.0.4:1")
    until(lambda: [host.name for host in training.cluster.hosts] == ["127.0.0.4"])
    training.wait_for_world(1)
    training.finish()
    assert not {"world-broken", "host-lost"} & {event.kind for event in training.cluster.events}
