"""Hosts that are pods which others have made: found by a label, entered by exec."""

from __future__ import annotations

import pytest

import nbelastic as nbe
from tests.kubernetes.fake_kubelet import IMAGE
from tests.process.programs import train
from tests.process.training import Training
from tests.support.waiting import until


def pod(name, gpus=0, **labels):
    limits = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}} if gpus else {}
    sleep = "trap '' TERM; exec sleep 100000"  # as the first process of a real container, it has no default for SIGTERM
    container = {"name": "main", "image": IMAGE, "command": ["sh", "-c", sleep], **limits}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 30},
        "status": {"phase": "Pending"},
    }


@pytest.fixture
def run_pod(nodes):
    """Run a pod as an operator does."""

    def run(name, **options):
        nodes.api.call(nodes.api.put, "pods", pod(name, app="trainer", **options))

    return run


@pytest.fixture
def start(run_pod, tmp_path):
    started = []

    def begin(discovery="kubernetes:app=trainer", **options):
        options = {"silence": 3, "cooldown": (0, 0), "log_dir": tmp_path / "logs", "stop_timeout": 5, **options}
        cluster = nbe.Cluster(discovery=discovery, **options)
        started.append(cluster)
        return cluster.start(timeout=60)

    yield begin
    for cluster in started:
        cluster.stop()


@pytest.mark.soak(share=0.2)
def test_training_in_pods_that_exist(nodes, run_pod, start, tmp_path):
    """Pods that are Ready and have the label are hosts. An evicted one leaves before; another one joins."""
    run_pod("trainer-0", gpus=2)
    run_pod("trainer-1")
    nodes.api.call(nodes.api.put, "pods", pod("other", app="else"))
    training = Training(start(min=3), tmp_path / "steps", train)
    training.wait_for_world(3)
    assert {host.name: host.slots for host in training.cluster.hosts} == {"trainer-0": 2, "trainer-1": 1}
    nodes.evict("trainer-1")
    until(lambda: [host.name for host in training.cluster.hosts] == ["trainer-0"])
    training.cluster.scale(min=2)
    training.wait_for_world(2)
    run_pod("trainer-2")
    training.wait_for_world(3)
    training.finish()
    assert not {"world-broken", "host-lost", "worker-lost"} & {event.kind for event in training.cluster.events}
    training.cluster.stop()
    assert {"trainer-0", "trainer-2", "other"} <= set(nodes.api.names())


@pytest.mark.soak(seconds=10)
def test_a_connection_to_a_pod_that_breaks_costs_no_step(nodes, run_pod, start, tmp_path):
    """The agents run on while the API does not answer, and the next connections reach them."""
    run_pod("trainer-0")
    run_pod("trainer-1")
    training = Training(start(min=2, silence=60), tmp_path / "steps", train)
    training.wait_for_world(2)
    generation = training.cluster.status().generation
    nodes.api.down()
    kinds = lambda: [event.kind for event in training.cluster.events]
    until(lambda: kinds().count("host-disconnected") == 2)
    steps = len(training.lines())
    until(lambda: len(training.lines()) > steps + 20)
    nodes.api.up()
    until(lambda: kinds().count("host-reconnected") == 2, 40)
    assert training.cluster.status().generation == generation
    training.finish()
    assert not {"world-broken", "host-lost"} & set(kinds())


def test_what_is_wrong_with_a_pod_is_named(nodes, run_pod, start):
    """A Python that the pod does not have ends the start with one line that says so."""
    run_pod("trainer-0")
    with pytest.raises(
        nbe.HostError, match=r"trainer-0: /opt/none/python cannot be started in the pod trainer-0: exec"
    ):
        start(python="/opt/none/python")


def test_a_forbidden_exec_is_named(nodes, run_pod, start):
    """Without the right to enter pods the start ends with one line that says so."""
    nodes.api.rules = [rule for rule in nodes.api.rules if "pods/exec" not in rule["resources"]]
    run_pod("trainer-0")
    with pytest.raises(nbe.HostError, match=r"trainer-0: Kubernetes forbids it \(.*\): apply the Role in docs"):
        start()


def test_a_discovery_without_a_label_is_refused():
    """It would take all pods of the namespace."""
    with pytest.raises(nbe.UsageError, match=r"name the pods by a label: --discover kubernetes:app=trainer"):
        nbe.Cluster(discovery="kubernetes")
