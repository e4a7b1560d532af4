"""The pods and Secrets that nbelastic makes, checked against Kubernetes' published schemas, and what it reads of pods."""

from __future__ import annotations

import json
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

import nbelastic as nbe
from nbelastic.provision.pod_manifest import label_value, labels_of, merged, parse_options, pod, pod_name, secret
from nbelastic.provision.pod_states import is_usable, slots_in, view

OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "notebook-0", "uid": "12"}
DOCS = Path(__file__).parents[2] / "docs"
VERSIONS = ("1.28", "1.34")


def manifest(slots=4, owner=OWNER, **options):
    labels = labels_of("demo", "0a1b2c3d")
    parsed = parse_options({"image": "lab/train:1", **options})
    arguments = {"labels": labels, "command": ["python3", "-c", "pass"], "grace": 30.0, "owner": owner}
    return pod(parsed, name="nb-demo-a-1", host="a", slots=slots, **arguments)


def check(found):
    for version in VERSIONS:
        kubernetes_validate.validate(found, version, strict=True)


ALL = {
    "gpus": "1", "memory": "64Gi", "cpus": "8", "shm": "16Gi", "node_selector": "gpu=h100,zone=b", "priority_class": "low",
    "queue": "team", "service_account": "runner", "pull_secret": "registry", "labels": "team=vision",
    "pod_spec": json.dumps({
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "containers": [{"name": "nbelastic", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
    }),
}  # fmt: skip


def test_a_pod_has_what_the_options_say():
    """Each option is where Kubernetes expects it, and the manifest is valid."""
    found = manifest(**ALL)
    check(found)
    spec, (container,) = found["spec"], found["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "4", "memory": "64Gi"}, "requests": {"cpu": "8"}}
    assert spec["nodeSelector"] == {"gpu": "h100", "zone": "b"}
    assert spec["priorityClassName"] == "low"
    assert found["metadata"]["labels"].items() >= {"kueue.x-k8s.io/queue-name": "team", "team": "vision"}.items()
    assert [mount["name"] for mount in container["volumeMounts"]] == ["shm", "keys", "data"]
    assert [volume["name"] for volume in spec["volumes"]] == ["shm", "keys", "data"]
    assert spec["restartPolicy"] == "Never"
    assert spec["terminationGracePeriodSeconds"] > 30
    assert not spec["automountServiceAccountToken"]


def test_a_plain_pod_asks_for_nothing_special():
    """Without options a pod needs no GPU, no queue and no owner."""
    found = manifest(owner=None)
    check(found)
    assert found["spec"]["containers"][0]["resources"] == {}
    assert "ownerReferences" not in found["metadata"]


def test_a_pod_that_waits_has_no_keys():
    """It gets them through the API when its agent starts."""
    labels = labels_of("demo", "0a1b2c3d")
    arguments = {"labels": labels, "command": ["python3", "-c", "pass"], "grace": 30.0, "owner": None}
    found = pod(parse_options({"image": "lab/x"}), name="n", host="a", slots=1, with_keys=False, **arguments)
    check(found)
    assert "secret" not in str(found["spec"])
    assert "env" not in found["spec"]["containers"][0]


def test_a_secret_ends_with_its_pod():
    """The Secret has the agent's configuration and is owned by the pod."""
    found = secret("nb-demo-a-1", labels_of("demo", "0a1b"), {"keys": {"a": "b"}}, OWNER)
    check(found)
    assert found["metadata"]["ownerReferences"] == [OWNER]
    assert json.loads(found["stringData"]["agent.json"]) == {"keys": {"a": "b"}}


@pytest.mark.parametrize("file", sorted((DOCS / "kubernetes").glob("*.yaml")), ids=lambda file: file.name)
def test_the_manifests_of_the_documentation_are_valid(file):
    """What a user applies with kubectl is valid."""
    for found in yaml.safe_load_all(file.read_text()):
        if found["apiVersion"].partition("/")[0] in ("v1", "rbac.authorization.k8s.io", "apps", "networking.k8s.io"):
            check(found)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"imag": "x"}, r"kubernetes has no option 'imag': choose among .*image"),
        ({"gpus": "one"}, r"gpus='one' is not a whole number"),
        ({"node_selector": "h100"}, r"node_selector='h100': write label=value"),
        ({"pod_spec": "{"}, r"pod_spec is not JSON"),
        ({"connect": "ssh"}, r"connect='ssh': choose direct or exec"),
        ({"pod_spec": "[]"}, r"pod_spec must be a JSON object"),
    ],
)
def test_a_wrong_option_is_named(options, error):
    with pytest.raises(nbe.UsageError, match=error):
        parse_options(options)


@pytest.mark.parametrize("host", ["a", "GPU_7.lab", "x" * 200, "ä", "-"])
@pytest.mark.parametrize("cluster", ["nbelastic-123-1", "My Cluster!", "y" * 90])
def test_names_are_valid(cluster, host):
    """Any cluster and host give a name and labels that Kubernetes accepts."""
    name = pod_name(cluster, host, "0123456789abcdef", 12345)
    assert len(name) <= 63
    assert label_value(name[:40]) == name[:40].strip("-")
    assert all(len(value) <= 63 for value in labels_of(cluster, "0a").values())


def test_lists_of_a_spec_are_joined_by_name():
    """A user's fields win; entries of one name are merged, and others are added."""
    base = {"a": 1, "list": [{"name": "x", "b": 1}, {"name": "y"}], "plain": [1]}
    further = {"a": 2, "list": [{"name": "x", "c": 2}, {"name": "z"}], "plain": [2], "new": {}}
    expected = {
        "a": 2,
        "list": [{"name": "x", "b": 1, "c": 2}, {"name": "y"}, {"name": "z"}],
        "plain": [1, 2],
        "new": {},
    }
    assert merged(base, further) == expected


def reported(phase="Pending", node="", metadata=None, container=None, conditions=(), **status):
    containers = [{"name": "main", "state": container}] if container else []
    rows = [{"type": kind, "status": state, **more} for kind, state, more in conditions]
    return {
        "metadata": metadata or {},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 35,
            "containers": [{"name": "main", "image": "lab/x"}],
            "initContainers": [{"name": "a", "image": "lab/a"}, {"name": "b", "image": "lab/prepare"}],
        },
        "status": {"phase": phase, "containerStatuses": containers, "conditions": rows, **status},
    }


UNSCHEDULABLE = ("PodScheduled", "False", {"reason": "Unschedulable", "message": "0/3 nodes are available."})
GATED = ("PodScheduled", "False", {"reason": "SchedulingGated", "message": "Scheduling is blocked due to gates"})


INITIALIZES, CLEAN = {"waiting": {"reason": "PodInitializing"}}, {"terminated": {"exitCode": 0}}


def inits(waiting=None, **state):
    """The states of two init containers, of which the first has succeeded."""
    return [{"name": "a", "state": CLEAN}, {"name": "b", "state": {"waiting": waiting} if waiting else state}]


@pytest.mark.parametrize(
    ("pod", "state"),
    [
        (reported(), "queued"),
        (reported(conditions=[UNSCHEDULABLE]), "queued (0/3 nodes are available.)"),
        (reported(conditions=[GATED]), "queued (Scheduling is blocked due to gates)"),
        (reported(node="n1"), "starting on n1"),
        (reported(node="n1", container={"waiting": {"reason": "ContainerCreating"}}), "starting on n1"),
        (
            reported(node="n1", container={"waiting": {"reason": "ErrImagePull", "message": "busy"}}),
            "starting on n1 (ErrImagePull: busy)",
        ),
        (
            reported(node="n1", container=INITIALIZES, initContainerStatuses=inits({"reason": "ErrImagePull"})),
            "starting on n1 (ErrImagePull)",
        ),
        (reported("Running", "n1"), "running on n1"),
        (
            reported("Running", "n1", initContainerStatuses=inits({"reason": "CrashLoopBackOff"})),
            "running on n1",
        ),
    ],
)
def test_a_pod_that_waits_says_why(pod, state):
    assert view(pod).state == state
    assert not view(pod).ended


@pytest.mark.parametrize(
    ("pod", "why"),
    [
        (reported("Failed", reason="Evicted", message="low on memory"), "its pod has ended (Evicted: low on memory)"),
        (
            reported("Failed", container={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
            "its pod ended with exit code 137 (OOMKilled)",
        ),
        (
            reported("Failed", container={"terminated": {"exitCode": 1, "reason": "Error", "message": "a\nlast\n"}}),
            "its pod ended with exit code 1: a; last",
        ),
        (
            reported("Failed", container={"terminated": {"exitCode": 1, "message": "No module named 'nbelastic'"}}),
            "nbelastic is not installed in its image: install it there, or name another Python with --python",
        ),
        (
            reported("Succeeded", container={"terminated": {"exitCode": 0}}),
            "its pod ended with exit code 0",
        ),
        (
            reported(node="n1", container={"waiting": {"reason": "InvalidImageName", "message": "no"}}),
            "its image lab/x is not a valid name (InvalidImageName: no)",
        ),
        (
            reported(node="n1", container=INITIALIZES, initContainerStatuses=inits({"reason": "ImagePullBackOff"})),
            "its image lab/prepare cannot be pulled (ImagePullBackOff)",
        ),
        (
            reported("Failed", container=INITIALIZES, initContainerStatuses=inits(terminated={"exitCode": 3})),
            "its pod ended with exit code 3",
        ),
        (
            reported("Succeeded", container=CLEAN, initContainerStatuses=inits(terminated={"exitCode": 143})),
            "its pod ended with exit code 0",
        ),
    ],
)
def test_a_pod_that_has_ended_says_why(pod, why):
    assert view(pod).ended == why


def test_announced_ends_of_pods():
    """Deletion and disruption announce the end, with the grace period that the pod has."""
    deleted = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 7}
    disrupted = ("DisruptionTarget", "True", {"reason": "PreemptionByScheduler"})
    ready = ("Ready", "True", {})
    assert view(reported("Running", "n", deleted)).leaves_within == 7.0
    preempted = view(reported("Running", "n", conditions=[disrupted]))
    assert (preempted.leaves_within, preempted.why) == (35.0, "PreemptionByScheduler of its pod")
    assert is_usable(reported("Running", "n", conditions=[ready]))
    assert not is_usable(reported("Running", "n", deleted, conditions=[ready]))
    assert not is_usable(reported("Running", "n", conditions=[("Ready", "False", {})]))


def test_slots_of_a_pod_are_its_gpus():
    """GPUs of any vendor count; a pod without one has one slot."""
    container = lambda limits: {"resources": {"limits": limits}}
    assert slots_in({"spec": {"containers": [container({"nvidia.com/gpu": "2"}), container({"amd.com/gpu": 1})]}}) == 3
    assert slots_in({"spec": {"containers": [container({"memory": "1Gi"}), {}]}}) == 1
