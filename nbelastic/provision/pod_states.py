"""What the API reports of a pod, in the driver's terms. Pure: objects of the API go in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

CLEAN_END = "its pod ended with exit code 0"
MOST_TEXT = 300  # characters of a message that are shown
# Reasons for which a container waits that do not pass by themselves, and what to do. A first failed pull may be a
# registry that is busy: the kubelet tries again, and reports ImagePullBackOff then.
_HOPELESS = {
    "ImagePullBackOff": "its image {image} cannot be pulled",
    "InvalidImageName": "its image {image} is not a valid name",
    "ErrImageNeverPull": "its image {image} is not on the node, and may not be pulled",
    "CreateContainerConfigError": "its container cannot be made",
    "CreateContainerError": "its container cannot be made",
    "RunContainerError": "its container cannot be started",
    "CrashLoopBackOff": "its container ends again and again",
}


class PodView(Struct, frozen=True):
    """`state`: for people, as `queued (0/3 nodes are available)`. `ended`: why the pod runs no agent any more, or never will.

    `leaves_within`: seconds in which the pod ends, as `why` says; None: that was not announced.
    """

    state: str = ""
    ended: str = ""
    leaves_within: float | None = None
    why: str = ""
    node: str = ""
    ready: bool = False

    @property
    def is_running(self) -> bool:
        return self.state.startswith("running")

    @property
    def is_starting(self) -> bool:
        """Whether a node has the pod, and its container does not run yet."""
        return self.state.startswith("starting")


def view(pod: Mapping[str, Any]) -> PodView:
    """The pod as the driver sees it. O(1)"""
    spec, status = pod.get("spec", {}), pod.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    node = spec.get("nodeName", "")
    ready = conditions.get("Ready", {}).get("status") == "True"
    within, why = _notice(pod, conditions)
    if status.get("phase") in ("Succeeded", "Failed"):
        return PodView("", _end(status), within, why, node)
    hopeless = _hopeless(spec, status)
    if hopeless:
        return PodView("", hopeless, within, why, node)
    return PodView(_state(status, conditions, node), "", within, why, node, ready)


def is_usable(pod: Mapping[str, Any]) -> bool:
    """Whether the pod is Ready, and its end was not announced."""
    found = view(pod)
    return found.ready and not found.ended and found.leaves_within is None


def slots_in(pod: Mapping[str, Any]) -> int:
    """One per GPU that the pod's containers may use, of any vendor; else 1."""
    limits = [each.get("resources", {}).get("limits") or {} for each in pod["spec"]["containers"]]
    gpus = [int(count) for each in limits for name, count in each.items() if name.rpartition("/")[2] == "gpu"]
    return sum(gpus) or 1


def _notice(pod: Mapping[str, Any], conditions: Mapping[str, Any]) -> tuple[float | None, str]:
    metadata, disruption = pod.get("metadata", {}), conditions.get("DisruptionTarget", {})
    disrupted = disruption.get("status") == "True"
    if not metadata.get("deletionTimestamp") and not disrupted:
        return None, ""
    grace = metadata.get("deletionGracePeriodSeconds")
    if grace is None:
        grace = pod.get("spec", {}).get("terminationGracePeriodSeconds", 30)
    why = f"{disruption.get('reason', 'a disruption')} of its pod" if disrupted else "the deletion of its pod"
    return float(grace), why


def _state(status: Mapping[str, Any], conditions: Mapping[str, Any], node: str) -> str:
    scheduled = conditions.get("PodScheduled", {})
    if status.get("phase") == "Running":
        return f"running on {node}"
    if not node or scheduled.get("status") == "False":
        why = scheduled.get("message") or scheduled.get("reason") or ""
        return f"queued ({_short(why)})" if why else "queued"
    for container in _containers(status):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"starting on {node} ({_with_message(waiting)})"
    return f"starting on {node}"


def _hopeless(spec: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    images = {
        each["name"]: each.get("image", "")
        for kind in ("containers", "initContainers")
        for each in spec.get(kind) or ()
    }
    # Beside a container that runs, one that has failed does no harm: an init container may go on as a sidecar.
    is_pending = status.get("phase") == "Pending"
    for container in _containers(status) if is_pending else status.get("containerStatuses") or ():
        waiting = container.get("state", {}).get("waiting", {})
        text = _HOPELESS.get(waiting.get("reason", ""))
        if text is not None:
            return f"{text.format(image=images.get(container['name'], ''))} ({_with_message(waiting)})"
    return ""


def _end(status: Mapping[str, Any]) -> str:
    """Why the pod has ended: the kubelet's reason, or the container's exit code and its last output."""
    if status.get("reason"):  # Evicted, NodeLost, DeadlineExceeded …
        return f"its pod has ended ({_with_message(status)})"
    for container in _containers(status):
        ended = container.get("state", {}).get("terminated")
        if ended is None:
            continue
        code, last = ended.get("exitCode"), "; ".join(str(ended.get("message") or "").strip().splitlines()[-5:])
        if "No module named 'nbelastic'" in last:
            return "nbelastic is not installed in its image: install it there, or name another Python with --python"
        reason = f" ({ended['reason']})" if ended.get("reason") not in (None, "Error", "Completed") else ""
        return f"its pod ended with exit code {code}{reason}" + (f": {last[-MOST_TEXT:]}" if code and last else "")
    return "its pod has ended"


def _containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The pod's containers, then its init containers that have not succeeded: the others wait for these."""
    first = status.get("initContainerStatuses") or ()
    late = [each for each in first if each.get("state", {}).get("terminated", {}).get("exitCode") != 0]
    return [*(status.get("containerStatuses") or ()), *late]


def _with_message(what: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (str(what.get("reason") or ""), _short(str(what.get("message") or "")))))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"
