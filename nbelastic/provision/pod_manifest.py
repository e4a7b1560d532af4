"""The pods that `--launcher kubernetes` makes, as plain data. Pure: nothing here uses the API."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from nbelastic.errors import UsageError

KEYS_FOLDER = "/var/run/nbelastic"  # where the pod's Secret is mounted
KEYS_FILE = "agent.json"
CONTAINER = "nbelastic"
MANAGED = {"app.kubernetes.io/name": "nbelastic", "app.kubernetes.io/managed-by": "nbelastic"}
CONNECT = ("direct", "exec")
GRACE = 5  # seconds that a pod has beyond the notice of its agent
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


class PodOptions(Struct, frozen=True, kw_only=True):
    """The launcher's options. Without `image`, the hosts are pods that exist, and agents start in them."""

    image: str = ""
    connect: str = (
        ""  # `direct`: agents connect to the notebook; `exec`: through the API. Default: whether it is in a pod
    )
    namespace: str = ""  # default: the notebook's, or that of the kubeconfig's context
    context: str = ""  # of the kubeconfig; default: its current one
    gpus: int = 0  # for each slot
    gpu_resource: str = "nvidia.com/gpu"
    cpus: str = ""  # for each pod, as `8` or `500m`
    memory: str = ""  # for each pod, as `32Gi`
    shm: str = ""  # limit of /dev/shm, which counts as memory; default: the pod's memory
    node_selector: Mapping[str, str] = {}
    priority_class: str = ""
    queue: str = ""  # Kueue's local queue
    service_account: str = ""
    pull_secret: str = ""
    labels: Mapping[str, str] = {}
    container: str = ""  # of an existing pod; default: its first one
    pod_spec: Mapping[str, Any] = {}  # further fields of the pod's spec


def parse_options(options: Mapping[str, Any]) -> PodOptions:
    """The options as users write them: all values are texts. UsageError for the first that is wrong."""
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in PodOptions.__struct_fields__:
            known = ", ".join(sorted(PodOptions.__struct_fields__))
            raise UsageError(f"kubernetes has no option {name!r}: choose among {known}.")
        values[name] = _parse(name, value)
    return PodOptions(**values)


def _parse(name: str, value: Any) -> Any:
    match name:
        case "gpus":
            if not (str(value).isascii() and str(value).isdigit()):
                raise UsageError(f"kubernetes: gpus={value!r} is not a whole number: GPUs for each slot.")
            return int(value)
        case "connect":
            if value not in CONNECT:
                raise UsageError(f"kubernetes: connect={value!r}: choose direct or exec.")
        case "node_selector" | "labels":
            return dict(value) if isinstance(value, Mapping) else _pairs(name, str(value))
        case "pod_spec":
            return dict(value) if isinstance(value, Mapping) else _json_object(name, str(value))
    return str(value).strip()


def _pairs(name: str, text: str) -> dict[str, str]:
    """`a=b,c=d`"""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key or not _LABEL.fullmatch(value):
            raise UsageError(f"kubernetes: {name}={text!r}: write label=value, several with commas.")
        found[key] = value
    return found


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"kubernetes: {name} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise UsageError(f"kubernetes: {name} must be a JSON object with fields of a pod's spec.")
    return found


def label_value(text: str) -> str:
    """The text as a label's value or a part of a name: up to 40 characters, others than letters and digits as `-`."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:40].strip("-") or "x"


def pod_name(cluster: str, host: str, start: str, number: int) -> str:
    """A name that no other pod of the namespace has. `start`: random, of the cluster's start; `number`: of the agent."""
    return f"nb-{label_value(cluster)[:20].strip('-')}-{label_value(host)[:20].strip('-')}-{label_value(start)[:8].strip('-')}-{number}"


def labels_of(cluster: str, start: str) -> dict[str, str]:
    """The labels by which a cluster's driver finds its pods."""
    return {**MANAGED, "nbelastic.io/cluster": label_value(cluster), "nbelastic.io/start": label_value(start)}


def pod(
    options: PodOptions,
    *,
    name: str,
    host: str,
    slots: int,
    labels: Mapping[str, str],
    command: list[str],
    grace: float,
    owner: Mapping[str, Any] | None,
    with_keys: bool = True,
) -> dict[str, Any]:
    """The pod of a host. `with_keys`: its keys are in a Secret of the same name. `grace`: seconds between SIGTERM and SIGKILL.

    `command` must replace itself with the agent, if it is a shell: only a container's first process gets SIGTERM.
    """
    shm = {"medium": "Memory", **({"sizeLimit": options.shm} if options.shm else {})}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # the driver would not know an agent that Kubernetes has started again
        "terminationGracePeriodSeconds": int(grace) + GRACE,
        "automountServiceAccountToken": False,  # a program needs no access to the API
        "enableServiceLinks": False,
        "shareProcessNamespace": True,  # its first process ends zombies: a Python as such would not
        "containers": [_container(options, slots, command)],
        "volumes": [{"name": "shm", "emptyDir": shm}],
    }
    wishes = {
        "nodeSelector": dict(options.node_selector),
        "priorityClassName": options.priority_class,
        "serviceAccountName": options.service_account,
        "imagePullSecrets": [{"name": options.pull_secret}] if options.pull_secret else None,
    }
    spec |= {field: value for field, value in wishes.items() if value}
    if with_keys:
        _mount_keys(spec, name)
    queue = {QUEUE_LABEL: options.queue} if options.queue else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {**options.labels, **queue, **labels},
            "annotations": {"nbelastic.io/host": host},
            **({"ownerReferences": [dict(owner)]} if owner else {}),
        },
        "spec": merged(spec, options.pod_spec),
    }


def _container(options: PodOptions, slots: int, command: list[str]) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": options.image,
        "command": command,
        "resources": _resources(options, slots),
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  (containers have 64 MiB there: too little for loaders)
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the pod's status then says why the agent has failed
    }


def _mount_keys(spec: dict[str, Any], secret_name: str) -> None:
    """Give the container the Secret with its agent's configuration."""
    (container,) = spec["containers"]
    container["env"] = [{"name": "NBELASTIC_AGENT", "value": f"{KEYS_FOLDER}/{KEYS_FILE}"}]
    container["volumeMounts"].append({"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True})
    # 0444: the image's user need not be root, and no other container of the pod mounts it
    spec["volumes"].append({"name": "keys", "secret": {"secretName": secret_name, "defaultMode": 0o444}})


def _resources(options: PodOptions, slots: int) -> dict[str, Any]:
    limits = {options.gpu_resource: str(options.gpus * slots)} if options.gpus else {}
    if options.memory:
        limits["memory"] = options.memory
    requests = {"cpu": options.cpus} if options.cpus else {}
    return {**({"limits": limits} if limits else {}), **({"requests": requests} if requests else {})}


def merged(spec: dict[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """The spec with a user's fields. Lists are joined, entries of one name are merged, and other values replaced."""
    result = dict(spec)
    for key, value in further.items():
        known = result.get(key)
        if isinstance(known, dict) and isinstance(value, Mapping):
            result[key] = merged(known, value)
        elif isinstance(known, list) and isinstance(value, list):
            result[key] = _joined(known, value)
        else:
            result[key] = value
    return result


def _joined(known: list[Any], further: list[Any]) -> list[Any]:
    named = {entry["name"]: entry for entry in further if isinstance(entry, dict) and "name" in entry}
    first = [merged(entry, named.pop(entry["name"], {})) if _is_named(entry) else entry for entry in known]
    return first + [entry for entry in further if not _is_named(entry) or entry["name"] in named]


def _is_named(entry: Any) -> bool:
    return isinstance(entry, dict) and "name" in entry


def secret(name: str, labels: Mapping[str, str], config: Mapping[str, Any], owner: Mapping[str, Any]) -> dict[str, Any]:
    """The Secret with an agent's configuration and keys. It ends with the pod that owns it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": {"name": name, "labels": dict(labels), "ownerReferences": [dict(owner)]},
        "stringData": {KEYS_FILE: json.dumps(config)},
    }


def owner_reference(owner: Mapping[str, Any]) -> dict[str, Any]:
    """The reference to a pod with which its dependents end."""
    metadata = owner["metadata"]
    return {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
