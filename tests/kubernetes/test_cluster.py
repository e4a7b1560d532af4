"""A cluster whose hosts are pods, on a fake Kubernetes."""

from __future__ import annotations

import json
import os
import signal

import pytest

import nbelastic as nbe
from tests.kubernetes.fake_kubelet import IMAGE
from tests.support.processes import driver_pid
from tests.support.waiting import until

LOSSES = {"world-broken", "host-lost", "worker-lost", "slot-backoff"}


def pod_of(nodes, host):
    """The newest pod of a host; empty if it has none."""
    pods = [
        pod["metadata"]["name"]
        for pod in list(nodes.api.objects["pods"].values())
        if pod["metadata"]["annotations"]["nbelastic.io/host"] == host
    ]
    return max(pods, key=lambda name: int(name.rpartition("-")[2]), default="")


def losses(cluster):
    return LOSSES & {event.kind for event in cluster.events}


def reasons(cluster):
    return {host.name: host.reason for host in cluster.hosts}


def test_an_evicted_pod_leaves_before_and_its_host_gets_another(nodes, trains):
    """No step is lost or repeated and no failure is counted. Another pod takes the host's place. Keys are in Secrets only."""
    training = trains("one:2,two:1")
    training.wait_for_world(3)
    assert set(nodes.api.names()) == set(nodes.api.names("secrets")) == {pod_of(nodes, "one"), pod_of(nodes, "two")}
    keys = [secret["stringData"]["agent.json"] for secret in nodes.api.objects["secrets"].values()]
    secrets = {text for each in keys for text in json.loads(each)["keys"].values() if text}
    assert secrets
    assert not [text for text in secrets if text in f"{nodes.api.objects['pods']} {nodes.api.commands}"]
    evicted = pod_of(nodes, "two")
    nodes.evict(evicted)
    until(lambda: evicted not in nodes.api.names())
    until(lambda: pod_of(nodes, "two"))
    training.wait_for_world(3)
    training.finish()
    assert not losses(training.cluster)


@pytest.mark.soak(seconds=8)
def test_a_lost_node_is_a_lost_host(nodes, trains):
    """The others train on after `silence`. The host's next pod is on another node."""
    training = trains("one:1,two:1")
    training.wait_for_world(2)
    lost = pod_of(nodes, "two")
    node = nodes.node_of(lost)
    nodes.lose(node)
    until(lambda: pod_of(nodes, "two") != lost, 30)
    training.wait_for_world(2)
    assert nodes.node_of(pod_of(nodes, "two")) != node
    training.finish()
    nodes.api.call(nodes.api.remove, "pods", lost)  # as Kubernetes does when the node is removed


@pytest.mark.soak(seconds=6)
def test_a_pod_that_is_gone_is_lost_at_once(nodes, trains):
    """The driver does not wait for `silence` when the API reports that a pod was removed by force. Unnamed pods are s0, s1."""
    training = trains(None, max=2, silence=60)
    training.wait_for_world(2)
    gone = pod_of(nodes, "s1")
    nodes.api.call(nodes.api.delete, "pods", gone, 0)
    training.wait_for_world(1)
    training.wait_for_world(2)
    training.finish()
    assert any("s1: its pod is gone" in event.text for event in training.cluster.events)


@pytest.mark.soak(seconds=8)
def test_the_training_outlives_an_outage_of_the_api(nodes, trains):
    """Training goes on, and what has changed meanwhile is seen later."""
    training = trains("one:1,two:1", silence=60)
    training.wait_for_world(2)
    nodes.api.down()
    steps = len(training.lines())
    until(lambda: len(training.lines()) > steps + 50)
    nodes.process(pod_of(nodes, "two")).kill()
    nodes.api.call(nodes.api.forget_changes)
    nodes.api.up()
    ends = ("two: its pod", "two: the connection of two has ended")  # either may be seen first
    until(
        lambda: any(end in event.text for end in ends for event in training.cluster.events if event.kind == "host-lost")
    )
    training.wait_for_world(2)
    training.finish()


def test_what_is_forbidden_is_named(nodes, start):
    """Without the right to create pods the start ends with one line that says so."""
    nodes.api.rules = [{"verbs": ["list", "watch", "get"], "resources": ["pods"]}]
    with pytest.raises(nbe.HostError) as caught:
        start("one:1")
    (line,) = str(caught.value).splitlines()
    assert "one: its pod cannot be created: Kubernetes forbids it" in line
    assert 'cannot create resource "pods"' in line
    assert "docs/kubernetes.md" in line


def test_a_wrong_start_is_refused(api):
    """Options and hosts are checked before anything is started."""
    for arguments, error in (
        ({}, "name the pods, or an image"),
        ({"hosts": "a:4", "launcher_options": {"imag": IMAGE}}, "kubernetes has no option 'imag'"),
    ):
        with pytest.raises(nbe.UsageError, match=error):
            nbe.Cluster(launcher="kubernetes", **arguments)


def test_a_wrong_image_is_named(nodes, start):
    """A pod whose image cannot be pulled ends the start with one line that says so."""
    with pytest.raises(nbe.HostError) as caught:
        start("one:1", launcher_options={"image": "registry.lab/none:1"})
    (line,) = str(caught.value).splitlines()
    assert "one: its image registry.lab/none:1 cannot be pulled (ImagePullBackOff: Back-off pulling" in line


@pytest.mark.soak(seconds=5)
def test_a_pod_without_a_place_waits(nodes, start):
    """The status shows why a pod waits. It joins when there is a place for it."""
    cluster = start("one:4,two:4,three:4", launcher_options={"gpus": "1"}, wait=False)
    queued = "queued (0/2 nodes are available: 2 Insufficient nvidia.com/gpu.)"
    until(lambda: queued in reasons(cluster).values())
    (name,) = [name for name, reason in reasons(cluster).items() if reason == queued]
    cluster.wait(8, timeout=60)
    other = next(host.name for host in cluster.hosts if host.name != name)
    cluster.remove_host(other)
    until(lambda: nodes.node_of(pod_of(nodes, name)))
    cluster.wait(8, timeout=60)


@pytest.mark.soak(seconds=10)
def test_a_cordoned_node_is_left(nodes, trains):
    """Workers leave a node that is cordoned, by a planned change, and the host's next pod is elsewhere."""
    training = trains("one:1,two:1")
    training.wait_for_world(2)
    node = nodes.node_of(pod_of(nodes, "one"))
    nodes.cordon(node)
    until(lambda: nodes.node_of(pod_of(nodes, "one") or pod_of(nodes, "two")) != node, 30)
    training.wait_for_world(2)
    training.finish()
    assert not losses(training.cluster)


@pytest.mark.soak(seconds=8)
def test_another_driver_takes_over_the_pods(nodes, trains):
    """When the driver is killed, the next one has the same pods, and deletes them at the stop."""
    training = trains("one:1,two:1")
    training.wait_for_world(2)
    before = nodes.api.names()
    os.kill(driver_pid(training.cluster), signal.SIGKILL)
    until(lambda: any(event.kind == "driver-came" for event in training.cluster.events))
    training.wait_for_world(2)
    assert nodes.api.names() == before
    nodes.evict(pod_of(nodes, "two"))
    until(lambda: pod_of(nodes, "two") not in before)
    training.wait_for_world(2)
    training.finish()


@pytest.mark.soak
def test_pods_that_cannot_connect_to_the_notebook(nodes, trains):
    """From a laptop agents are reached through the API. An evicted pod leaves before; no Secret is made, and all is deleted."""
    training = trains("one:1,two:1", launcher_options={"connect": "exec"})
    training.wait_for_world(2)
    assert nodes.api.names("secrets") == []
    evicted = pod_of(nodes, "two")
    nodes.evict(evicted)
    until(lambda: pod_of(nodes, "two") not in (evicted, ""))
    training.wait_for_world(2)
    training.finish()
    assert not losses(training.cluster)


@pytest.mark.soak(seconds=15)
def test_another_driver_takes_over_pods_behind_tunnels(nodes, trains):
    """When the driver is killed, the next one has the same pods and agents, and deletes the pods at the stop."""
    training = trains("one:1,two:1", launcher_options={"connect": "exec"})
    training.wait_for_world(2)
    before, generation = nodes.api.names(), training.cluster.status().generation
    os.kill(driver_pid(training.cluster), signal.SIGKILL)
    until(lambda: any(event.kind == "driver-came" for event in training.cluster.events))
    training.wait_for_world(2)
    assert (nodes.api.names(), training.cluster.status().generation) == (before, generation)
    training.finish()
